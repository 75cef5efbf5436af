"""Reusable batch memory: page faults on newly allocated batches would cost more CPU time than resizing the images."""

from __future__ import annotations

import weakref

import numpy as np
import torch
from torch import Tensor


class TensorPool:
    """A pool of float32 tensors of one shape; memory returns to the pool when its last tensor is garbage-collected."""

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
