"""Do in a trace what the planned machine does: run its forms of attention and autocast, hold what DeepSpeed's engine holds.

PyTorch builds without CUDA know no tensors of a GPU. Three things differ there: attention runs in a fused kernel, with a learned bias
too, Φp of all layers is one network, and CUDA's autocast computes norms, softmax and sums in float32, which the CPU's leaves in bf16.
On a CPU, what :mod:`pipeline.kernels.chunked` does in a loop counts as the one operator that it is to the model.

The engine's allocations are those of :mod:`pipeline.optim.plain_engine`, or of DeepSpeed 0.19's ``stage_1_and_2.py`` and ``stage3.py``
with the settings of :func:`pipeline.optim.engine.deepspeed_config`, of the rank that holds most.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from pipeline.config import Config
from pipeline.kernels import chunked
from pipeline.kernels.peripheral import aligned_width, biased_attention, fits_kernels, packed_attention
from pipeline.models import convit
from pipeline.models.common import layers, vit
from pipeline.models.common.base import VisionModel
from pipeline.models.pervit import phi_model
from pipeline.optim.build import optimizer_description, parameter_groups
from pipeline.optim.description import MATRICES
from pipeline.optim.engine import GATHER_BUCKET, REDUCE_BUCKET
from pipeline.optim.flat import PARTS
from pipeline.planning.trace import CONVOLUTION, GRADIENTS, PARAMETERS, PERIPHERAL, PHI_MAPS, Trace

OPTIMIZER, BUCKETS = "optimizer state", "communication buckets"
MASTER, TEMPORARIES = "ZeRO's copy of its weights", "optimizer's temporaries"
_PREFETCH = 50_000_000  # elements that ZeRO-3 gathers ahead: DeepSpeed's default
_GROUPS = 8  # of images whose gradients of the bias the Triton kernel keeps apart (pipeline.kernels.fused.GROUPS)
_TILE = 16  # heads that Φp's kernels compute at once (pipeline.kernels.fused.SMALLEST_BLOCK)
# What CUDA's autocast computes in float32: "CUDA Ops that can autocast to float32" in PyTorch's documentation of torch.amp.
_FLOAT32 = frozenset(
    "acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss cosine_similarity cross_entropy dist erfinv exp expm1 "
    "group_norm hinge_embedding_loss kl_div l1_loss layer_norm log log10 log1p log2 log_softmax margin_ranking_loss mse_loss "
    "multi_margin_loss multilabel_margin_loss nll_loss norm pdist poisson_nll_loss pow reciprocal renorm rsqrt sinh smooth_l1_loss "
    "soft_margin_loss softmax softmin softplus tan triplet_margin_loss".split()
)
_FLOAT32_SUMS = frozenset("cumprod cumsum prod sum".split())  # which read bf16, without a copy


@dataclass(frozen=True)
class Layout:
    """How a run is divided, and on what: together with its config all that a trace depends on."""

    world_size: int
    stage: int  # of ZeRO that the run takes, 0 on one process
    accumulates: bool  # a step has several micro-batches
    on_gpu: bool  # the devices are GPUs, else CPUs
    kernels: bool  # the Triton kernels run there


@contextmanager
def forms_of(trace: Trace, model: VisionModel, layout: Layout) -> Iterator[None]:
    """In the block, the model's functions keep in memory and run what they do on the planned device; attention is one operator."""
    with ExitStack() as stack:
        if layout.on_gpu:
            model.groups_phi = layout.stage < 3
            stack.enter_context(patch.object(vit, "suits_chunks", lambda qkv, bias: False))
            cuda = torch.device("cuda")
            stack.enter_context(patch.object(layers, "aligned_width", lambda size, _: aligned_width(size, cuda)))
            if layout.kernels:
                stack.enter_context(patch.object(vit, "packed_attention", partial(_packed_attention, trace)))
                stack.enter_context(patch.object(convit, "peripheral_attention", partial(_triton_attention, trace)))
                stack.enter_context(patch.object(phi_model, "suits_kernels", fits_kernels))
                stack.enter_context(patch.object(phi_model, "phi_maps", partial(_PhiMaps.apply, trace)))
            stack.enter_context(_CudaFunctions(trace))
        else:
            stack.enter_context(patch.object(chunked, "_InChunks", _chunks_of(trace)))
        yield


def _packed_attention(trace: Trace, qkv: Tensor, log_phi: Tensor | None, head_dim: int | None = None) -> Tensor:
    """:func:`pipeline.kernels.peripheral.packed_attention` on a GPU that runs the Triton kernels."""
    return packed_attention(qkv, None, head_dim) if log_phi is None else _Fused.apply(trace, log_phi, *_cast(qkv))


def _triton_attention(trace: Trace, q: Tensor, k: Tensor, v: Tensor, log_phi: Tensor | None) -> Tensor:
    """:func:`pipeline.kernels.peripheral_attention` there."""
    if log_phi is None:
        return biased_attention(q, k, v, None)
    return _packed_attention(trace, torch.stack([part.transpose(1, 2) for part in (q, k, v)], 2), log_phi).transpose(1, 2)


class _CudaFunctions(TorchFunctionMode):
    """CUDA's autocast beyond that of the CPU, and its fused attention."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "").strip("_")
        if func is F.scaled_dot_product_attention:
            # PyTorch's attention on a GPU, which writes the bias's gradient for every image.
            q, k, v = _cast(*args[:3])
            mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
            bias = None if mask is None else _cast(mask)[0].expand(*q.shape[:-1], k.shape[-2])
            return _Fused.apply(self._trace, bias, q, k, v).transpose(-3, -2)
        casts = torch.is_autocast_enabled("cpu") and [getattr(value, "dtype", None) is torch.bfloat16 for value in args]
        if casts and name in _FLOAT32:
            args = tuple(value.float() if cast else value for value, cast in zip(args, casts))
        elif casts and name in _FLOAT32_SUMS and casts[0]:
            kwargs = {"dtype": torch.float32, **kwargs}
        return func(*args, **kwargs)


def _cast(*tensors: Tensor) -> list[Tensor]:
    """To bf16 under autocast."""
    casts = torch.is_autocast_enabled("cpu")
    return [tensor.to(torch.bfloat16) if casts and tensor.is_floating_point() else tensor for tensor in tensors]


class _Fused(torch.autograd.Function):
    """What fused attention allocates and keeps, as one operator: PyTorch's, of q, k, v (..., N, head_dim) and a bias (..., N, N); or that
    of :mod:`pipeline.kernels.fused`, of one tensor qkv (B, N, 3, heads, width) and log Φp (heads, N, N). Returns (..., N, heads, width):
    the heads of a token are side by side, so that merging them needs no copy."""

    @staticmethod
    def forward(ctx: Any, trace: Trace, bias: Tensor | None, *tensors: Tensor) -> Tensor:
        q, _, v = heads = _heads_of(tensors)
        with trace.recording(False):
            *batch, count, tokens, _ = q.shape
            out = q.new_empty(*batch, tokens, count, v.shape[-1])
            ctx.save_for_backward(bias, out, q.new_empty(q.shape[:-1], dtype=torch.float32), *tensors)
        ctx.trace, ctx.name = trace, PERIPHERAL if len(tensors) == 1 else ""
        trace.attention(2, heads, [*tensors, *([] if bias is None else [bias])], [out], name=ctx.name)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        bias, out, log_sums, *tensors = ctx.saved_tensors
        learned = []
        with ctx.trace.recording(False):
            gradients = [torch.empty_like(tensor) for tensor in tensors]
            if ctx.name:
                torch.empty_like(log_sums)
            if bias is not None and ctx.needs_input_grad[1]:
                parts = bias.new_empty(min(_GROUPS, len(out)), *bias.shape).sum(0) if ctx.name else out.new_empty(bias.shape)
                learned.append(parts)
        read = [tensor for tensor in (*tensors, out, bias, grad) if tensor is not None]
        ctx.trace.attention(5, _heads_of(tensors), read, [*gradients, *learned], 2 + len(learned), ctx.name)
        return None, *(learned or [None]), *gradients


def _heads_of(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """q, k and v (..., heads, N, width), of these or of (B, N, 3, heads, width)."""
    return tensors if len(tensors) == 3 else [part.transpose(1, 2) for part in tensors[0].unbind(2)]


class _PhiMaps(torch.autograd.Function):
    """What :func:`pipeline.kernels.peripheral.phi_maps` allocates and keeps, as one operator."""

    @staticmethod
    def forward(ctx: Any, trace: Trace, *inputs: Any) -> Tensor:
        distance, kernel1, _, _, _, kernel2, _ = inputs
        tokens, _, rows, columns = distance.shape
        out = distance.new_empty(tokens, len(kernel2), rows - 4, columns - 4)
        layers = len(kernel1) // kernel2.shape[1]
        # Its matrix products have room for a tile of heads.
        tile = layers * -(-len(kernel2) // layers // _TILE) * _TILE
        products = [tokens * (rows - 2) * (columns - 2) * kernel1.numel(), out[:, 0].numel() * tile * kernel2[0].numel()]
        ctx.save_for_backward(*inputs[:-1])
        ctx.trace, ctx.products = trace, products
        trace.kernel(PHI_MAPS, CONVOLUTION, 2.0 * sum(products), [*inputs[:-1]], [out], elements=out.numel())
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        distance, kernel1, shift, *rest = inputs = ctx.saved_tensors
        parts = [learned.new_empty(len(distance), *learned.shape) for learned in (kernel1, *rest)]  # of each query
        flops = 2.0 * (ctx.products[0] + 2 * ctx.products[1])
        ctx.trace.kernel(PHI_MAPS, CONVOLUTION, flops, [*inputs, grad], parts, elements=grad.numel())
        dkernel1, *others = (part.sum(0) for part in parts)
        return None, None, dkernel1, torch.zeros_like(shift), *others, None


def _chunks_of(trace: Trace) -> Any:
    """:mod:`pipeline.kernels.chunked`, which is traced for its memory, as one operator."""
    computed = chunked._InChunks

    class InChunks(computed):  # type: ignore[misc, valid-type]
        @staticmethod
        def forward(ctx: Any, qkv: Tensor, bias: Tensor, heads: int) -> Tensor:
            with trace.recording(False):
                out = computed.forward(ctx, qkv, bias, heads)
            trace.attention(2, vit.split_heads(qkv, 3, heads), [qkv, bias], [out])
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
            qkv, weights, _ = saved = ctx.saved_tensors  # which may be asked for once
            known = SimpleNamespace(saved_tensors=saved, **vars(ctx))
            with trace.recording(False):
                grad_qkv, grad_bias, _ = computed.backward(known, grad)
            # Four products, as the weights are kept.
            trace.attention(4, vit.split_heads(qkv, 3, ctx.heads), [qkv, weights, grad], [grad_qkv, grad_bias])
            return grad_qkv, grad_bias, None

    return InChunks


class EngineMemory:
    """What the engine of a ZeRO stage holds, and allocates at each moment of a step.

    ===== ====================================================================================================================
    0     all of the parameters, gradients and optimizer state on every rank; gradients are collected in flat ones, a part at a time
    1, 2  a shard of the optimizer's state, of the weights that it updates and, once reduced, of the gradients: of every
          micro-batch with 2, of the step with 1
    3     a shard of everything; a model of less than 1e9 parameters keeps what it has gathered until its backward pass is done
    ===== ====================================================================================================================
    """

    def __init__(self, trace: Trace, model: nn.Module, config: Config, layout: Layout) -> None:
        self._new, self._trace, self._layout, self._stage = trace.new, trace, layout, layout.stage
        self.optimizer, self._precision = optimizer_description(config.optim), config.train.precision
        self._groups = [group for group in parameter_groups(model, config.optim) if group["params"]]
        self.parameters: list[Tensor] = [parameter for group in self._groups for parameter in group["params"]]
        self._every, kept = list(model.parameters()), [len(self.optimizer.state(group).tensors) for group in self._groups]
        # Of the whole run, before ZeRO 3 empties the parameters.
        self.elements, self._all_elements = _elements(self.parameters), _elements(self._every)
        self.state_elements = sum(_elements(group["params"]) * numbers for group, numbers in zip(self._groups, kept))
        matrices = (parameter for group in self._groups if group[MATRICES] for parameter in group["params"])
        self.matrix_flops = sum(self.optimizer.matrix_flops(tuple(matrix.shape)) for matrix in matrices)
        # Of this process.
        self.weights = self._all_elements / (layout.world_size if self._stage == 3 else 1)
        processes = layout.world_size if self._stage else 1
        self._shards = [math.ceil(_elements(group["params"]) / processes) for group in self._groups]
        self._held = [self._new(size * numbers, OPTIMIZER) for size, numbers in zip(self._shards, kept)]
        if self._stage:
            self._held.append(self._new(sum(self._shards), MASTER))
        if self._stage == 3:
            held = {PARAMETERS: self.weights, GRADIENTS: sum(self._shards), BUCKETS: REDUCE_BUCKET}
            self._held += [self._new(size, label) for label, size in held.items()]
        if self._stage == 0:
            self._held.append(self._new(self.elements, GRADIENTS))
        self._filled = 0  # elements of the bucket
        self._buffers: list[Tensor] = []
        self._large: list[Tensor] = []  # gradients that are not copied into a buffer; without ZeRO, parameters with gradients
        self._partition: Tensor | None = None  # gradients of this rank's parameters, of this micro-batch
        self._sums: Tensor | None = None  # of the micro-batches before
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def accumulate(self) -> None:
        """A step's other micro-batches are done: what they leave. With ZeRO 3, nothing: its shard is there from the beginning."""
        if self._stage == 0:
            self._held.append(self._new(self.elements / PARTS, GRADIENTS))  # a part's gradients, to be added
        if self._stage == 1:
            with self._trace.labelled(GRADIENTS):
                for parameter in self.parameters:
                    parameter.grad = torch.empty_like(parameter)
            self._allocate_buffers()
        if self._stage == 2:
            self._sums = self._new(self._own_elements(), GRADIENTS)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """In the block, what is gathered ahead, in one tensor until the last parameter of it, which is a copy, has been used."""
        gathered = self._new(min(self._all_elements, _PREFETCH), BUCKETS) if self._stage == 3 else None
        yield
        del gathered

    def _on_gradient(self, parameter: Tensor) -> None:
        """A parameter's gradient of this micro-batch is complete."""
        assert parameter.grad is not None
        self._trace.relabel(parameter.grad, GRADIENTS)
        self._trace.keep(parameter.grad)
        if not self._stage:
            self._large.append(parameter)
            self._filled += parameter.numel()
            if self._filled >= self.elements / PARTS:
                self._collect()
            return
        self._allocate_buffers()
        if self._filled + parameter.numel() > REDUCE_BUCKET:
            self._reduce()
        if self._stage < 3 and parameter.numel() > REDUCE_BUCKET:
            self._large.append(parameter.grad)
        parameter.grad = None
        if self._stage == 3:
            parameter.data = torch.empty(0)  # what was gathered is let go: nothing of this step needs it any more
        self._filled += parameter.numel()

    def after_backward(self) -> None:
        """The backward pass of the step's last micro-batch is over."""
        (self._reduce if self._stage else self._collect)()
        self._buffers = []
        self._sums = self._sums if self._sums is not None else self._partition
        self._partition = None

    def step(self) -> None:
        if self._stage == 3:
            for weight in self._every:  # frozen ones
                weight.data = torch.empty(0)
        for group, size in zip(self._groups, self._shards):
            gradient = self._new(size if self._stage else 0, GRADIENTS)
            self._new(self.optimizer.temporaries(group, size, self._stage > 0, self._precision), TEMPORARIES)
            del gradient
        self._sums = None
        for parameter in self.parameters:
            parameter.grad = None
        if self._stage in (1, 2) and not self._layout.on_gpu:  # NCCL gathers in place; gloo into a tensor of its own
            for group in self._groups:
                self._new(min(_elements(group["params"]), GATHER_BUCKET), BUCKETS)

    def _allocate_buffers(self) -> None:
        if self._stage < 3 and not self._buffers:
            self._buffers = [self._new(REDUCE_BUCKET, BUCKETS) for _ in range(2)]

    def _collect(self) -> None:
        for parameter in self._large:
            parameter.grad = None
        self._large, self._filled = [], 0

    def _reduce(self) -> None:
        if self._filled:
            copies = 2 if self._stage == 3 and not self._layout.on_gpu else 1  # gloo's own
            self._new(copies * self._filled, BUCKETS)  # the slices of all ranks in one tensor
            if self._stage < 3 and self._partition is None:
                self._partition = self._new(self._own_elements(), GRADIENTS)
        self._large, self._filled = [], 0

    def _own_elements(self) -> int:
        """Of the parameters that the fullest rank's shards have a part of, whole, as ZeRO 1 and 2 keep their gradients."""
        held = [0] * self._layout.world_size
        for group, shard in zip(self._groups, self._shards):
            end = 0
            for parameter in group["params"]:
                begin, end = end, end + parameter.numel()
                for rank in range(begin // shard, (end - 1) // shard + 1):
                    held[rank] += parameter.numel()
        return max(held)


def _elements(tensors: list) -> int:
    return sum(tensor.numel() for tensor in tensors)
