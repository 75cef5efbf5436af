"""Counts the bytes of live tensors, operator by operator, under fake tensors: sizes are exact and nothing is allocated."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

PARAMETERS, WEIGHT_COPIES = "parameters", "bf16 copies of the weights"


class LiveMemory(TorchDispatchMode):
    """Every storage that an operator returns counts from then on until its last tensor is gone, under the label of that moment.

    PyTorch's own ``MemTracker`` does the like in a private module, with labels of its own and hooks on every module.

    Attributes:
        live: bytes by label, now.
        peak: bytes by label at the moment at which their sum was largest.
        peak_total: that sum.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.total = self.peak_total = 0
        self._label = "other"
        self._entries: dict[int, tuple[str, int]] = {}  # of each storage by its address: label, bytes

    @contextmanager
    def labelled(self, label: str) -> Iterator[None]:
        """New storages have this label."""
        before, self._label = self._label, label
        try:
            yield
        finally:
            self._label = before

    def new(self, elements: float, label: str) -> Tensor:
        """A float32 tensor of so many elements, for what a trace does not contain; it counts as long as it is kept."""
        with self.labelled(label):
            return torch.empty(int(elements), dtype=torch.float32)

    def relabel(self, tensor: Tensor, label: str) -> None:
        """From now on the tensor's storage has this label."""
        key = tensor.untyped_storage()._cdata
        if key in self._entries:
            before, size = self._entries[key]
            self.live[before] -= size
            self.live[label] += size
            self._entries[key] = label, size

    def label_of(self, tensor: Tensor) -> str | None:
        """The label of the tensor's storage; None: it is unknown."""
        return self._entries.get(tensor.untyped_storage()._cdata, (None, 0))[0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0  # a fake tensor has no value; no size depends on one here
        result = func(*args, **(kwargs or {}))
        label = self._label
        if func is torch.ops.aten._to_copy.default and self.label_of(args[0]) == PARAMETERS:
            label = WEIGHT_COPIES
        for value in tree_iter(result):
            if isinstance(value, Tensor):
                self._add(value, label)
        return result

    def _add(self, tensor: Tensor, label: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._entries:
            return
        size = storage.nbytes()
        self._entries[key] = label, size
        self.live[label] += size
        self.total += size
        if self.total > self.peak_total:
            self.peak, self.peak_total = Counter(self.live), self.total
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        label, size = self._entries.pop(key)
        self.live[label] -= size
        self.total -= size
