"""Allocate in a trace what DeepSpeed's engine and the optimizer hold beside the model, by ZeRO stage.

The allocations are those of DeepSpeed 0.19's ``stage_1_and_2.py`` and ``stage3.py`` with the settings of
:func:`pipeline.optim.engine.deepspeed_config`, of the rank that holds most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeline.config import OptimConfig
from pipeline.optim.build import optimizer_description, parameter_groups
from pipeline.optim.description import MATRICES, Group
from pipeline.optim.engine import GATHER_BUCKET, REDUCE_BUCKET
from pipeline.planning.trace import GRADIENTS, PARAMETERS, Trace

OPTIMIZER, BUCKETS = "optimizer state", "communication buckets"
MASTER, TEMPORARIES = "ZeRO's copy of its weights", "optimizer's temporaries"
_PREFETCH = 50_000_000  # elements that ZeRO-3 gathers ahead: DeepSpeed's default


@dataclass(frozen=True)
class Layout:
    """How a run is divided, and on what: together with its config all that a trace depends on."""

    world_size: int
    stage: int  # of ZeRO that the run takes, 0 on one process
    accumulates: bool  # a step has several micro-batches
    on_gpu: bool  # the devices are GPUs, else CPUs
    kernels: bool  # the Triton kernels run there


class EngineMemory:
    """The engine of a ZeRO stage.

    ===== ====================================================================================================================
    0     all of the parameters, gradients and optimizer state on every rank
    1, 2  a shard of the optimizer's state, of the weights that it updates and, once reduced, of the gradients: of every
          micro-batch with 2, of the step with 1
    3     a shard of everything; a model of less than 1e9 parameters keeps what it has gathered until its backward pass is done
    ===== ====================================================================================================================
    """

    def __init__(self, trace: Trace, model: nn.Module, optim: OptimConfig, layout: Layout) -> None:
        self._new, self._trace, self._layout, self._stage = trace.new, trace, layout, layout.stage
        self.optimizer = optimizer_description(optim)
        self.groups = [group for group in parameter_groups(model, optim) if group["params"]]
        self.parameters: list[Tensor] = [parameter for group in self.groups for parameter in group["params"]]
        self._every = list(model.parameters())
        processes = layout.world_size if self._stage else 1
        self._shards = [math.ceil(_elements(group["params"]) / processes) for group in self.groups]
        self._held = [self._new(size * self._kept(group), OPTIMIZER) for group, size in zip(self.groups, self._shards)]
        if self._stage:
            self._held.append(self._new(sum(self._shards), MASTER))
        if self._stage == 3:
            self._held.append(self._new(_elements(self._every) / layout.world_size, PARAMETERS))
            self._held.append(self._new(sum(self._shards), GRADIENTS))
            self._held.append(self._new(REDUCE_BUCKET, BUCKETS))
        self._filled = 0  # elements of the bucket
        self._buffers: list[Tensor] = []
        self._large: list[Tensor] = []  # gradients that are not copied into a buffer
        self._partition: Tensor | None = None  # gradients of this rank's parameters, of this micro-batch
        self._sums: Tensor | None = None  # of the micro-batches before
        self._gathered: Tensor | None = None
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    @property
    def state_elements(self) -> int:
        """Numbers that the optimizer keeps, over all processes."""
        return sum(_elements(group["params"]) * self._kept(group) for group in self.groups)

    @property
    def matrix_flops(self) -> float:
        """Floating-point operations of the matrix products in its step."""
        matrices = (parameter for group in self.groups if group[MATRICES] for parameter in group["params"])
        return sum(self.optimizer.matrix_flops(tuple(matrix.shape)) for matrix in matrices)

    def accumulate(self) -> None:
        """A step's other micro-batches are done: what they leave. With ZeRO 3, nothing: its shard is there from the beginning."""
        if self._stage < 2:
            with self._trace.labelled(GRADIENTS):
                for parameter in self.parameters:
                    parameter.grad = torch.empty_like(parameter)
        if self._stage == 1:
            self._allocate_buffers()
        if self._stage == 2:
            self._sums = self._new(self._own_elements(), GRADIENTS)

    def before_forward(self) -> None:
        """A micro-batch begins."""
        if self._stage == 3:
            # One gathering for all that is fetched ahead, kept until the last parameter of it, which is a copy, has been used.
            self._gathered = self._new(min(_elements(self._every), _PREFETCH), BUCKETS)

    def after_forward(self) -> None:
        """Its scores are there."""
        self._gathered = None

    def _on_gradient(self, parameter: Tensor) -> None:
        """A parameter's gradient of this micro-batch is complete."""
        assert parameter.grad is not None
        self._trace.relabel(parameter.grad, GRADIENTS)
        self._trace.keep(parameter.grad)
        if not self._stage:
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
        if self._stage:
            self._reduce()
        elif self._layout.world_size > 1:  # all gradients in one tensor
            self._new(_elements(self.parameters), BUCKETS)
        self._buffers = []
        self._sums = self._sums if self._sums is not None else self._partition
        self._partition = None

    def step(self) -> None:
        """The optimizer's step."""
        if self._stage == 3:
            for weight in self._every:  # frozen ones
                weight.data = torch.empty(0)
        for group, size in zip(self.groups, self._shards):
            gradient = self._new(size if self._stage else 0, GRADIENTS)
            self._new(self.optimizer.temporaries(group, size, self._stage > 0), TEMPORARIES)
            del gradient
        self._sums = None
        for parameter in self.parameters:
            parameter.grad = None
        if self._stage in (1, 2) and not self._layout.on_gpu:  # NCCL gathers in place; gloo into a tensor of its own
            for group in self.groups:
                self._new(min(_elements(group["params"]), GATHER_BUCKET), BUCKETS)

    def _kept(self, group: Group) -> int:
        """Numbers that the optimizer keeps for each parameter of a group."""
        return len(self.optimizer.state(group).tensors)

    def _allocate_buffers(self) -> None:
        if self._stage < 3 and not self._buffers:
            self._buffers = [self._new(REDUCE_BUCKET, BUCKETS) for _ in range(2)]

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
        for group, shard in zip(self.groups, self._shards):
            end = 0
            for parameter in group["params"]:
                begin, end = end, end + parameter.numel()
                for rank in range(begin // shard, (end - 1) // shard + 1):
                    held[rank] += parameter.numel()
        return max(held)


def _elements(tensors: list) -> int:
    return sum(tensor.numel() for tensor in tensors)
