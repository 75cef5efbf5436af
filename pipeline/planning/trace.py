"""Record a step on tensors without values: bytes of live tensors at the peak, and every operator with its operations and bytes.

The tensors are PyTorch's fake ones: sizes are exact, nothing is allocated, and no GPU is needed.
"""

import math
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple
from unittest.mock import patch

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
PERIPHERAL, PHI_MAPS = "peripheral attention", "maps of Φp"  # names of operators
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
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: Counter[str] = Counter()  # bytes by label, now
        self.peak: Counter[str] = Counter()  # at the moment at which their sum was largest
        self.total = self.peak_total = 0  # these sums
        self.operators: list[Operator] = []
        self.kept: set[int] = set()  # numbers of the memory that is needed after the operators
        self._label = "other"
        self._records = self._backward = False
        self._memory: dict[int, _Memory] = {}  # by the address of the storage
        self._number = 0  # of the next storage

    def labelled(self, label: str) -> AbstractContextManager:
        """In the block, new storages have this label."""
        return patch.object(self, "_label", label)

    def recording(self, records: bool = True, backward: bool | None = None) -> AbstractContextManager:
        """Write operators down in the block, or not; ``backward``: they belong to the backward pass, None: as before."""
        return patch.multiple(self, _records=records, _backward=self._backward if backward is None else backward)

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
        self, products: int, qkv: Sequence[Tensor], read: list[Tensor], written: list[Tensor], kernels: int = 1, name: str = ""
    ) -> None:
        """Write down attention, or its gradients, as one operator that starts so many ``kernels`` on a GPU. ``products``: of matrices, 2
        forward, more backward. ``qkv``: (..., N, head_dim) each. ``name``: :data:`PERIPHERAL` if the kernels are ours."""
        q, k, v = qkv
        scores = q.shape[:-1].numel() * k.shape[-2]
        flops = float(products * scores * (q.shape[-1] + v.shape[-1]))
        # A forward pass within a backward pass is that of a recomputation.
        facts = {"elements": scores, "recomputed": self._backward and products == 2, "kernels": kernels}
        self.kernel(name or "attention", ATTENTION, flops, read, written, **facts)

    def kernel(self, name: str, kind: str, flops: float, read: list[Tensor], written: list[Tensor], **facts: Any) -> None:
        """Write down an operator, also one that PyTorch does not see as such. ``facts``: other fields of :class:`Operator`."""
        if not self._records:
            return
        times = 2 if name in _READS_TWICE else 1
        reads = tuple((self._known(tensor).number, times * _size(tensor)) for tensor in read)
        writes = tuple((self._known(tensor).number, _size(tensor)) for tensor in written)
        dtype = next((tensor.dtype for tensor in (*written, *read) if tensor.is_floating_point()), torch.int64)
        self.operators.append(Operator(name, kind, flops, reads, writes, dtype=dtype, backward=self._backward, **facts))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0  # a fake tensor has no value; no size depends on one here
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        label = self._label
        if func is torch.ops.aten._to_copy.default:
            copied = self._memory.get(args[0].untyped_storage()._cdata)
            label = WEIGHT_COPIES if copied and copied.label == PARAMETERS else label
        for value in _tensors(result):
            self._known(value, label, counts=True)
        if self._records and func.namespace == "aten" and not func.is_view:
            self._write_down(func, args, kwargs, result)
        return result

    def _known(self, tensor: Tensor, label: str = "other", counts: bool = False) -> _Memory:
        """The tensor's storage, which was there before the trace unless it ``counts``."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._memory:
            size = storage.nbytes() if counts else 0
            self._memory[storage._cdata] = _Memory(self._number, label, size)
            self._number += 1
            weakref.finalize(storage, self._drop, storage._cdata)
            self.live[label] += size
            self.total += size
            if self.total > self.peak_total:
                self.peak, self.peak_total = Counter(self.live), self.total
        return self._memory[storage._cdata]

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
        read, written = _tensors((args, kwargs)), _tensors(result)
        if not read and not written:
            return
        if name.startswith("_scaled_dot_product"):
            backward = name.endswith("_backward")
            qkv = args[1:4] if backward else args[:3]
            # Without the sums of the rows, (B, heads, N).
            read, written = ([tensor for tensor in tensors if tensor.ndim == qkv[0].ndim] for tensors in (read, written))
            self.attention(5 if backward else 2, qkv, read, written)
            return
        kind, flops = MAP, 0.0
        if "convolution" in name:
            kind, flops = _convolution(name, args, result)
        elif counter := flop_registry.get(func._overloadpacket):
            kind, flops = PRODUCT, float(counter(*args, **kwargs, out_val=result))
        largest = max(tensor.numel() for tensor in (*read, *written))
        # Autograd computes gradients without a graph, and a checkpoint recomputes with one.
        again = self._backward and torch.is_grad_enabled()
        self.kernel(name, kind, flops, read, written, elements=largest, recomputed=again)


def _tensors(tree: Any) -> list[Tensor]:
    return [value for value in tree_iter(tree) if isinstance(value, Tensor)]


def _size(tensor: Tensor) -> int:
    """Bytes of a tensor; an expanded dimension counts once."""
    return tensor.element_size() * math.prod(n for n, stride in zip(tensor.shape, tensor.stride()) if stride or n == 0)


def _convolution(name: str, args: Any, result: Any) -> tuple[str, float]:
    """Kind and operations; PyTorch's own count takes no notice of groups in the backward pass."""
    backward = name == "convolution_backward"
    weight, groups = (args[2], args[9]) if backward else (args[1], args[8])  # (out, in / groups, rows, columns)
    products = args[0].numel() * sum(args[10][:2]) if backward else result.numel()
    narrow = min(weight.shape[0] // groups, weight[0].numel()) < _NARROW_SIDE
    return NARROW if narrow else CONVOLUTION, 2.0 * products * weight[0].numel()


def fused(operators: Sequence[Operator], kept: set[int]) -> list[Operator]:
    """What a compiler makes of them: adjacent bandwidth-bound operators become one, which reads what others have written and writes what
    others read. ``operators``: in order; ``kept``: numbers of the memory that is read after the last of them."""
    last_read = {number: place for place, operator in enumerate(operators) for number, _ in operator.reads}
    joined: list[Operator] = []
    end = 0
    for (fuses, *_), alike in groupby(operators, lambda each: (each.kind == MAP, each.backward, each.recomputed)):
        group = list(alike)
        end += len(group)
        joined += [_joined(group, end, last_read, kept)] if fuses else group
    return joined


def _joined(group: list[Operator], end: int, last_read: dict[int, int], kept: set[int]) -> Operator:
    """The operators of a group, which ends before place ``end``, as one."""
    written: dict[int, int] = {}
    read: dict[int, int] = {}
    for operator in group:
        for number, size in operator.reads:
            if number not in written:
                read[number] = max(size, read.get(number, 0))
        for number, size in operator.writes:
            written[number] = max(size, written.get(number, 0))
    needed = {n: size for n, size in written.items() if last_read.get(n, -1) >= end or n in kept}
    return replace(
        group[0],
        name=next((o.name for o in group if o.name in TRANSCENDENTAL), group[0].name),
        reads=tuple(read.items()),
        writes=tuple(needed.items()),
        elements=max(operator.elements for operator in group),
        kernels=1 + sum(operator.name.endswith("_backward") and "norm" in operator.name for operator in group),
    )
