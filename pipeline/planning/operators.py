"""The operators of a training step: what PyTorch would run for the model's forward and backward pass, with operations and bytes.

The model is built and run on PyTorch's ``meta`` device, whose tensors have shapes and no values. That costs no memory, takes a second,
and gives the operators of a GPU's form on a machine that has none. Attention is one operator, as its fused kernels are. What autocast
would cast is cast here by its lists, because it knows no ``meta`` tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from pipeline.config import Config
from pipeline.errors import UserError
from pipeline.planning.fake_forms import Forms, autocast_by
from pipeline.planning.traced_step import fake_free_model, run_backward

# Kinds, in the order of a page.
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
    """One call of an operator.

    Attributes:
        name: PyTorch's, without the overload.
        kind: one of ``KINDS``.
        flops: 2 per multiply-accumulate of products, attention and convolutions; 0 of all others.
        reads, writes: (number of the memory, bytes) of each tensor. Views of the same memory have the same number.
        elements: of the largest tensor that it reads or writes.
        dtype: that it computes in.
        backward: whether it belongs to the backward pass.
        recomputed: by activation checkpointing.
        kernels: that it starts on a GPU.
    """

    name: str
    kind: str
    flops: float
    reads: tuple[tuple[int, int], ...]
    writes: tuple[tuple[int, int], ...]
    elements: int
    dtype: torch.dtype
    backward: bool = False
    recomputed: bool = False
    kernels: int = 1

    @property
    def bytes(self) -> int:
        """Read and written."""
        return sum(size for _, size in (*self.reads, *self.writes))


@dataclass
class Step:
    """The operators of one micro-batch, and what the rest of the step depends on.

    Attributes:
        operators: in order; forward, then backward.
        kept: numbers of the memory that is needed after them: gradients and scores.
        parameters: shapes of all that learn.
        buffers: bytes of the buffers that a checkpoint has.
    """

    operators: list[Operator]
    kept: set[int] = field(default_factory=set)
    parameters: list[tuple[int, ...]] = field(default_factory=list)
    buffers: int = 0

    @property
    def parameter_count(self) -> int:
        return sum(map(math.prod, self.parameters))


def trace_step(
    config: Config, batch: int, precision: str, on_gpu: bool, fused_attention: bool = True, learn: bool = True
) -> Step:
    """The operators of one micro-batch's forward pass, loss and backward pass.

    Args:
        config: the run.
        batch: images of the micro-batch.
        precision: "bf16", with autocast, or "fp32".
        on_gpu: the form that runs on a GPU, else that on a CPU.
        fused_attention: attention is one operator; False: the products and softmax of its textbook form.
        learn: with the backward pass; False: an evaluation.

    Raises:
        UserError: the model cannot be built, or does not run without values.
    """
    settings = config.model
    model = fake_free_model(config).train(learn)
    model.groups_phi = on_gpu
    recorder = _Recorder()
    images = torch.empty(batch, 3, settings.image_size, settings.image_size, device="meta")
    noise = torch.empty(batch, model.noise_per_sample, device="meta") if learn and model.noise_per_sample else None
    labels = torch.empty(batch, dtype=torch.long, device="meta")
    try:
        with recorder, torch.set_grad_enabled(learn):
            with Forms(recorder, precision, on_gpu, fused_attention) as forms, autocast_by(forms):
                scores = model(images, noise).float()
                if learn:
                    loss = F.cross_entropy(scores, labels) + F.cross_entropy(scores, labels)  # of the two labels of a mixture
                    ones = torch.ones_like(loss)
                    recorder.backward = True
                    run_backward(loss, ones)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        if not settings.name.startswith("timm:"):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise UserError(
            f"model.name is {settings.name}, whose step cannot be planned without values of tensors ({reason})",
            "measure it instead: pipeline.train with train.max_steps=100, then --measured with its output_dir",
        ) from None
    kept = {recorder.number(p.grad) for p in model.parameters() if p.grad is not None} | {recorder.number(scores)}
    buffers = model.state_dict().keys() - dict(model.named_parameters()).keys()
    return Step(
        operators=recorder.operators,
        kept=kept,
        parameters=[tuple(p.shape) for p in model.parameters() if p.requires_grad],
        buffers=sum(_size(model.get_buffer(name)) for name in buffers),
    )


class _Recorder(TorchDispatchMode):
    """Writes down every operator that moves data."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Operator] = []
        self.backward = self.recomputing = False
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # so that no memory's address is taken by another

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::").removesuffix("_")
        if func.is_view or name in _FREE or func.namespace != "aten":
            return out
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if given or made:
            counter = flop_registry.get(func._overloadpacket)
            flops = 0.0
            if "convolution" in name:
                flops = _convolution_flops(name, args, out)
            elif counter:
                flops = float(counter(*args, **kwargs, out_val=out))
            self.add(name, _kind(name, flops, args), flops, given, made)
        return out

    def add(self, name: str, kind: str, flops: float, given: list[Tensor], made: list[Tensor], kernels: int = 1) -> None:
        """Add an operator that reads and writes these tensors."""
        times = 2 if name in _READS_TWICE else 1
        reads = tuple((self.number(t), times * _size(t)) for t in given)
        writes = tuple((self.number(t), _size(t)) for t in made)
        dtype = next((t.dtype for t in (*made, *given) if t.is_floating_point()), torch.int64)
        largest = max(t.numel() for t in (*given, *made))
        self.operators.append(
            Operator(
                name, kind, flops, reads, writes, largest, dtype, self.backward, self.backward and self.recomputing, kernels
            )
        )

    def attention(self, flops: float, scores: int, given: list[Tensor], made: list[Tensor], kernels: int) -> None:
        """Add attention, or its gradients, of so many scores."""
        self.add("attention", ATTENTION, flops, given, made, kernels)
        self.operators[-1] = replace(self.operators[-1], elements=scores)

    def number(self, tensor: Tensor) -> int:
        """A number of the tensor's memory, the same for all of its views."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            self._alive.append(storage)
        return self._numbers[key]


def _size(tensor: Tensor) -> int:
    """Bytes of a tensor; an expanded dimension counts once."""
    return tensor.element_size() * math.prod(n for n, stride in zip(tensor.shape, tensor.stride()) if stride or n == 0)


def _convolution_flops(name: str, args: Any, out: Any) -> float:
    """PyTorch's own count takes no notice of groups in the backward pass."""
    if name != "convolution_backward":
        return 2.0 * out.numel() * args[1][0].numel()
    return 2.0 * args[0].numel() * args[2][0].numel() * sum(args[10][:2])


def _kind(name: str, flops: float, args: Any) -> str:
    if not flops:
        return MAP
    if "convolution" not in name:
        return PRODUCT
    backward = name == "convolution_backward"
    weight, groups = (args[2], args[9]) if backward else (args[1], args[8])  # (out, in / groups, rows, columns)
    return NARROW if min(weight.shape[0] // groups, weight[0].numel()) < _NARROW_SIDE else CONVOLUTION
