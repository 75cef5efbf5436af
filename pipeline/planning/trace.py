"""Record a step on tensors without values: bytes of live tensors at the peak, and every operator with its operations and bytes.

The tensors are PyTorch's fake ones: sizes are exact, nothing is allocated, and no GPU is needed.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

# Labels of memory that the trace itself gives or knows.
PARAMETERS, WEIGHT_COPIES, GRADIENTS = "parameters", "bf16 copies of the weights", "gradients"
# Kinds of operators, in the order of a page.
PRODUCT, ATTENTION, CONVOLUTION, NARROW, MAP = (
    "matrix products", "attention", "convolutions", "depthwise and narrow convolutions", "bandwidth-bound operators",
)  # fmt: skip
KINDS = (PRODUCT, ATTENTION, CONVOLUTION, NARROW, MAP)
_NARROW_SIDE = 32  # a convolution whose weights are a smaller matrix, per group, keeps no matrix unit busy

# What moves no data: views, and memory that is written later.
_FREE = frozenset(
    "detach alias empty empty_like empty_strided new_empty new_empty_strided _unsafe_view lift_fresh _local_scalar_dense".split()
)
# Operators that go through their inputs more than once: statistics first, or sums for the parameters apart.
_READS_TWICE = frozenset(
    "native_batch_norm native_batch_norm_backward native_layer_norm_backward native_group_norm native_group_norm_backward".split()
)
# Several instructions for each element: an exponential or the like.
TRANSCENDENTAL = frozenset(
    "gelu gelu_backward _softmax _log_softmax exp log sigmoid tanh silu silu_backward erf pow log_sigmoid_forward log_sigmoid_backward".split()
)


@dataclass(frozen=True)
class Operator:
    """One call of an operator."""

    name: str  # PyTorch's, without the overload
    kind: str  # one of ``KINDS``
    flops: float  # 2 per multiply-accumulate of products, attention and convolutions; 0 of all others
    # (number of the memory, bytes) of each tensor. Views of the same memory have the same number.
    reads: tuple[tuple[int, int], ...]
    writes: tuple[tuple[int, int], ...]
    elements: int  # of the largest tensor that it reads or writes; of attention, its scores
    dtype: torch.dtype  # that it computes in
    backward: bool = False  # whether it belongs to the backward pass
    recomputed: bool = False  # by activation checkpointing
    kernels: int = 1  # that it starts on a GPU

    @property
    def bytes(self) -> int:
        """Read and written."""
        return sum(size for _, size in (*self.reads, *self.writes))


class _Memory(NamedTuple):
    """A storage."""

    number: int
    label: str
    size: int  # bytes; 0: it was there before the trace


class Trace(TorchDispatchMode):
    """Every storage that an operator returns counts from then on until its last tensor is gone, under the label of that moment; and
    every operator that moves data is written down while :meth:`recording`.

    PyTorch's own ``MemTracker`` counts memory in a private module, with labels of its own and hooks on every module.

    Attributes:
        live: bytes by label, now.
        peak: bytes by label at the moment at which their sum was largest.
        peak_total: that sum.
        operators: in order.
        kept: numbers of the memory that is needed after the operators.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.total = self.peak_total = 0
        self.operators: list[Operator] = []
        self.kept: set[int] = set()
        self._label = "other"
        self._records = self._backward = False
        self._memory: dict[int, _Memory] = {}  # by the address of the storage
        self._count = 0

    @contextmanager
    def labelled(self, label: str) -> Iterator[None]:
        """New storages have this label."""
        before, self._label = self._label, label
        try:
            yield
        finally:
            self._label = before

    @contextmanager
    def recording(self, records: bool = True, backward: bool | None = None) -> Iterator[None]:
        """Write operators down in the block, or not; ``backward``: they belong to the backward pass, None: as before."""
        before = self._records, self._backward
        self._records, self._backward = records, before[1] if backward is None else backward
        try:
            yield
        finally:
            self._records, self._backward = before

    def new(self, elements: float, label: str) -> Tensor:
        """A float32 tensor of so many elements, for what a trace does not contain; it counts as long as it is kept."""
        with self.labelled(label):
            return torch.empty(int(elements), dtype=torch.float32)

    def relabel(self, tensor: Tensor, label: str) -> None:
        """From now on the tensor's storage has this label."""
        memory = self._known(tensor)
        self.live[memory.label] -= memory.size
        self.live[label] += memory.size
        self._memory[tensor.untyped_storage()._cdata] = memory._replace(label=label)

    def keep(self, tensor: Tensor) -> None:
        """The tensor is needed after the operators."""
        self.kept.add(self._known(tensor).number)

    def attention(
        self, flops: float, scores: int, read: list[Tensor], written: list[Tensor], backward: bool, kernels: int = 1
    ) -> None:
        """Write down attention, or its gradients, of so many scores as one operator."""
        if self._records:
            # A forward pass within a backward pass is that of a recomputation.
            self._add("attention", ATTENTION, flops, read, written, scores, self._backward and not backward, kernels)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0  # a fake tensor has no value; no size depends on one here
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        label = self._label
        if func is torch.ops.aten._to_copy.default:
            copied = self._memory.get(args[0].untyped_storage()._cdata)
            label = WEIGHT_COPIES if copied and copied.label == PARAMETERS else label
        for value in tree_iter(result):
            if isinstance(value, Tensor):
                self._count_memory(value, label)
        if self._records and func.namespace == "aten" and not func.is_view:
            self._write_down(func, args, kwargs, result)
        return result

    def _count_memory(self, tensor: Tensor, label: str) -> None:
        if tensor.untyped_storage()._cdata in self._memory:
            return
        size = tensor.untyped_storage().nbytes()
        self._register(tensor, label, size)
        self.live[label] += size
        self.total += size
        if self.total > self.peak_total:
            self.peak, self.peak_total = Counter(self.live), self.total

    def _known(self, tensor: Tensor) -> _Memory:
        key = tensor.untyped_storage()._cdata
        return self._memory[key] if key in self._memory else self._register(tensor, "other", 0)

    def _register(self, tensor: Tensor, label: str, size: int) -> _Memory:
        storage = tensor.untyped_storage()
        self._count += 1
        self._memory[storage._cdata] = memory = _Memory(self._count, label, size)
        weakref.finalize(storage, self._drop, storage._cdata)
        return memory

    def _drop(self, key: int) -> None:
        memory = self._memory.pop(key)
        self.live[memory.label] -= memory.size
        self.total -= memory.size

    def _write_down(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = func._schema.name.removeprefix("aten::").removesuffix("_")
        if name in _FREE:
            return
        if name == "add" and self._known(args[0]).label == GRADIENTS:
            # The sum with the gradient of earlier micro-batches, which the first of a step does not have, is not written down.
            self.keep(args[1])
            return
        read = [value for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)]
        written = [value for value in tree_iter(result) if isinstance(value, Tensor)]
        if not read and not written:
            return
        if name.startswith("_scaled_dot_product"):
            backward = name.endswith("_backward")
            q, k, v = args[1:4] if backward else args[:3]
            times = 2.5 if backward else 1.0  # five products instead of two
            flops, scores = times * product_flops(q, k, v), score_count(q, k)
            # Without the sums of the rows, (B, heads, N).
            read, written = ([tensor for tensor in tensors if tensor.ndim == q.ndim] for tensors in (read, written))
            self.attention(flops, scores, read, written, backward)
            return
        flops = 0.0
        if "convolution" in name:
            flops = _convolution_flops(name, args, result)
        elif counter := flop_registry.get(func._overloadpacket):
            flops = float(counter(*args, **kwargs, out_val=result))
        largest = max(tensor.numel() for tensor in (*read, *written))
        # Autograd computes gradients without a graph, and a checkpoint recomputes with one.
        self._add(name, _kind(name, flops, args), flops, read, written, largest, self._backward and torch.is_grad_enabled())

    def _add(
        self,
        name: str,
        kind: str,
        flops: float,
        read: list[Tensor],
        written: list[Tensor],
        elements: int,
        recomputed: bool,
        kernels: int = 1,
    ) -> None:
        times = 2 if name in _READS_TWICE else 1
        reads = tuple((self._known(tensor).number, times * _size(tensor)) for tensor in read)
        writes = tuple((self._known(tensor).number, _size(tensor)) for tensor in written)
        dtype = next((tensor.dtype for tensor in (*written, *read) if tensor.is_floating_point()), torch.int64)
        self.operators.append(Operator(name, kind, flops, reads, writes, elements, dtype, self._backward, recomputed, kernels))


def product_flops(q: Tensor, k: Tensor, v: Tensor) -> float:
    """Floating-point operations of q kᵀ and of the weights times v; (..., N, head_dim) each."""
    return 2.0 * score_count(q, k) * (q.shape[-1] + v.shape[-1])


def score_count(q: Tensor, k: Tensor) -> int:
    """Elements of q kᵀ; (..., N, head_dim) each."""
    return q.shape[:-1].numel() * k.shape[-2]


def _size(tensor: Tensor) -> int:
    """Bytes of a tensor; an expanded dimension counts once."""
    return tensor.element_size() * math.prod(n for n, stride in zip(tensor.shape, tensor.stride()) if stride or n == 0)


def _convolution_flops(name: str, args: Any, result: Any) -> float:
    """PyTorch's own count takes no notice of groups in the backward pass."""
    if name != "convolution_backward":
        return 2.0 * result.numel() * args[1][0].numel()
    return 2.0 * args[0].numel() * args[2][0].numel() * sum(args[10][:2])


def _kind(name: str, flops: float, args: Any) -> str:
    if not flops:
        return MAP
    if "convolution" not in name:
        return PRODUCT
    backward = name == "convolution_backward"
    weight, groups = (args[2], args[9]) if backward else (args[1], args[8])  # (out, in / groups, rows, columns)
    return NARROW if min(weight.shape[0] // groups, weight[0].numel()) < _NARROW_SIDE else CONVOLUTION
