"""The distributions of the authors' initial weights."""

from __future__ import annotations

import numpy as np
import torch

from support import initial_weights

from .models import small


def summaries(name: str) -> dict[str, np.ndarray]:
    """Those of a small model; see :func:`support.initial_weights.summarize`."""
    torch.set_default_dtype(torch.float32)
    return initial_weights.summarize(lambda: small(name).state_dict())
