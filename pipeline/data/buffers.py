"""Memory for batches that is used again: fresh pages for each batch cost more CPU time than the image's resize."""

from __future__ import annotations

import weakref

import numpy as np
import torch
from torch import Tensor


class TensorPool:
    """Hands out float32 tensors of one shape; one whose last user has gone is handed out again."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        self._free: list[np.ndarray] = []

    def take(self) -> Tensor:
        """An uninitialized tensor on the CPU."""
        memory = self._free.pop() if self._free else np.empty(self._shape, dtype=np.float32)
        # The tensor's storage, and so every tensor that shares it, keeps `handle` alive.
        handle = memory.view()
        weakref.finalize(handle, self._free.append, memory).atexit = False
        return torch.from_numpy(handle)
