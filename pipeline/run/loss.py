"""The loss of images that are mixtures of two labels, and what becomes of a loss that is not finite."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.data.loader import Batch


def mixed_cross_entropy(scores: Tensor, batch: Batch, label_smoothing: float) -> Tensor:
    """Mean cross entropy of images that are mixtures of two labels.

    Cross entropy is linear in the target, so mixing two losses is what mixing the two smoothed one-hot vectors is
    (Mixup's equation for the target).

    Args:
        scores: (B, classes), any floating type.
        batch: with ``labels``, ``other_labels`` and ``weight``.
        label_smoothing: share of each target spread over all classes.
    """
    own, other = (
        F.cross_entropy(scores.float(), labels, label_smoothing=label_smoothing, reduction="none")  # (B,)
        for labels in (batch.labels, batch.other_labels)
    )
    return (batch.weight * own + (1 - batch.weight) * other).mean()


def spread_nonfinite(loss: Tensor) -> Tensor:
    """The loss itself; if it is not finite then its gradient is not either, which all processes notice and none has to ask for."""
    return loss * torch.where(loss.isfinite(), 1.0, torch.nan)
