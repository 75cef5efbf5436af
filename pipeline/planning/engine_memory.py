"""What DeepSpeed's engine and the optimizer hold beside the model, by ZeRO stage, as tensors in a trace (:mod:`.live_memory`).

Each class repeats the allocations of DeepSpeed 0.19's ``stage_1_and_2.py`` and ``stage3.py`` with the settings of
:func:`pipeline.optim.engine.deepspeed_config`, of the rank that holds most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from pipeline.config import OptimConfig
from pipeline.optim.build import parameter_groups
from pipeline.optim.description import MATRICES
from pipeline.planning.live_memory import PARAMETERS, LiveMemory

GRADIENTS, OPTIMIZER, BUCKETS = "gradients", "optimizer state", "communication buckets"
MASTER, TEMPORARIES = "ZeRO's copy of its weights", "optimizer's temporaries"
BUCKET = 5_000_000  # elements of a gradient bucket: pipeline.optim.engine
_GATHER = 50_000_000  # of the updated weights that ZeRO 1 and 2 gather at once: pipeline.optim.engine
_PREFETCH = 50_000_000  # elements that ZeRO-3 gathers ahead: DeepSpeed's default


class EngineMemory:
    """ZeRO 0: all of the parameters, gradients and moments on every rank.

    Args:
        live: the trace.
        model: with fake parameters.
        optim: of the config.
        world_size: number of processes.
    """

    shared = 1  # processes that divide the optimizer's state

    def __init__(self, live: LiveMemory, model: nn.Module, optim: OptimConfig, world_size: int) -> None:
        self.live, self.optim, self.world_size = live, optim, world_size
        self.groups = [group for group in parameter_groups(model, optim) if group["params"]]
        self.parameters: list[Tensor] = [parameter for group in self.groups for parameter in group["params"]]
        self.shared = self._shares()
        self.shards = [math.ceil(_elements(group["params"]) / self.shared) for group in self.groups]
        self.state = [live.new(size * self._moments(group), OPTIMIZER) for group, size in zip(self.groups, self.shards)]
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.on_gradient)

    def accumulate(self) -> None:
        """A step's other micro-batches are done: what they leave."""
        with self.live.labelled(GRADIENTS):
            for parameter in self.parameters:
                parameter.grad = torch.empty_like(parameter)

    def before_forward(self) -> None:
        """A micro-batch begins."""

    def after_forward(self) -> None:
        """Its scores are there."""

    def on_gradient(self, parameter: Tensor) -> None:
        """A parameter's gradient of this micro-batch is complete."""
        assert parameter.grad is not None
        self.live.relabel(parameter.grad, GRADIENTS)

    def after_backward(self) -> None:
        """The backward pass of the step's last micro-batch is over."""
        if self.world_size > 1:  # all gradients in one tensor
            self.live.new(_elements(self.parameters), BUCKETS)

    def step(self) -> None:
        """The optimizer's step."""
        for group, size in zip(self.groups, self.shards):
            self._update(group, size)
        for parameter in self.parameters:
            parameter.grad = None

    def _shares(self) -> int:
        return 1

    def _moments(self, group: dict) -> int:
        return 1 if self.optim.name == "muon" and group[MATRICES] else 2

    def _update(self, group: dict, size: int) -> None:
        """The temporaries of an update of ``size`` elements: AdamW's fused kernel has none."""
        if self.optim.name == "lamb":
            self.live.new(2 * size, TEMPORARIES)  # denominators and updates
        elif self.optim.name == "muon" and group[MATRICES]:
            largest = max(parameter.numel() for parameter in group["params"])
            joined = 0.5 * _elements(group["params"]) if self.shared > 1 else 0.0  # split matrices put together, in bf16
            self.live.new(size + joined + 5 * largest, TEMPORARIES)  # updates; scratch and iterates of one matrix


class PartitionedState(EngineMemory):
    """ZeRO 1 and 2: a shard of the optimizer's state, of the weights that it updates, and, once reduced, of the gradients.

    Args:
        splits_gradients: stage 2: reduce the gradients of every micro-batch; else those of the step.
        on_gpu: NCCL gathers in place; gloo into a tensor of its own.
    """

    def __init__(
        self, live: LiveMemory, model: nn.Module, optim: OptimConfig, world_size: int, splits_gradients: bool, on_gpu: bool
    ) -> None:
        super().__init__(live, model, optim, world_size)
        self._on_gpu = on_gpu
        self.splits_gradients = splits_gradients
        self.master = live.new(sum(self.shards), MASTER)
        self._own = _of_fullest_rank(self.groups, world_size)
        self._buffers: list[Tensor] = []
        self._bucket: list[Tensor] = []  # large gradients, which are not copied into the buffer
        self._filled = 0
        self._partition: Tensor | None = None  # gradients of this rank's parameters, of this micro-batch
        self._sums: Tensor | None = None  # of the micro-batches before

    def accumulate(self) -> None:
        if self.splits_gradients:
            self._sums = self.live.new(self._own, GRADIENTS)
        else:
            super().accumulate()
            self._allocate_buffers()

    def on_gradient(self, parameter: Tensor) -> None:
        super().on_gradient(parameter)
        self._allocate_buffers()
        if self._filled + parameter.numel() > BUCKET:
            self._reduce()
        if parameter.numel() > BUCKET:
            assert parameter.grad is not None
            self._bucket.append(parameter.grad)
        parameter.grad = None
        self._filled += parameter.numel()

    def after_backward(self) -> None:
        self._reduce()
        self._buffers = []
        self._sums = self._sums if self._sums is not None else self._partition
        self._partition = None

    def step(self) -> None:
        for group, size in zip(self.groups, self.shards):
            gradient = self.live.new(size, GRADIENTS)
            self._update(group, size)
            del gradient
        self._sums = None
        if not self._on_gpu:
            for group in self.groups:
                self.live.new(min(_elements(group["params"]), _GATHER), BUCKETS)

    def _shares(self) -> int:
        return self.world_size

    def _allocate_buffers(self) -> None:
        if not self._buffers:
            self._buffers = [self.live.new(BUCKET, BUCKETS) for _ in range(2)]

    def _reduce(self) -> None:
        if self._filled:
            self.live.new(self._filled, BUCKETS)  # the slices of all ranks in one tensor
            if self._partition is None:
                self._partition = self.live.new(self._own, GRADIENTS)
        self._bucket, self._filled = [], 0


class PartitionedWeights(EngineMemory):
    """ZeRO 3: a shard of everything. A model of less than 1e9 parameters keeps what it has gathered until its backward pass has used it.

    Args:
        on_gpu: gradients are reduced by NCCL; gloo makes a copy of them.
    """

    def __init__(self, live: LiveMemory, model: nn.Module, optim: OptimConfig, world_size: int, on_gpu: bool) -> None:
        super().__init__(live, model, optim, world_size)
        self._copies = 1 if on_gpu else 2
        self._every = list(model.parameters())
        self.weights = live.new(_elements(self._every) / world_size, PARAMETERS)
        self.master = live.new(sum(self.shards), MASTER)  # it compares a device with a name, and copies where they are equal
        self.gradients = live.new(sum(self.shards), GRADIENTS)
        self._buffer = live.new(BUCKET, BUCKETS)
        self._gathered: Tensor | None = None
        self._filled = 0

    def accumulate(self) -> None:
        """Nothing: the shard of the gradients is there from the beginning."""

    def before_forward(self) -> None:
        # One gathering for all that is fetched ahead, kept until the last parameter of it, which is a copy, has been used.
        self._gathered = self.live.new(min(_elements(self._every), _PREFETCH), BUCKETS)

    def after_forward(self) -> None:
        self._gathered = None

    def on_gradient(self, parameter: Tensor) -> None:
        super().on_gradient(parameter)
        if self._filled + parameter.numel() > BUCKET:
            self._reduce()
        parameter.grad = None
        parameter.data = torch.empty(0)  # what was gathered is let go: nothing of this step needs it any more
        self._filled += parameter.numel()

    def after_backward(self) -> None:
        self._reduce()

    def step(self) -> None:
        for parameter in self._every:  # frozen ones
            parameter.data = torch.empty(0)
        for group, size in zip(self.groups, self.shards):
            gradient = self.live.new(size, GRADIENTS)
            self._update(group, size)
            del gradient

    def _shares(self) -> int:
        return self.world_size

    def _reduce(self) -> None:
        if self._filled:
            self.live.new(self._copies * self._filled, BUCKETS)  # interleaved by rank
        self._filled = 0


def engine_memory(
    live: LiveMemory, model: nn.Module, optim: OptimConfig, world_size: int, stage: int, on_gpu: bool
) -> EngineMemory:
    """The engine of a ZeRO stage."""
    if stage == 0:
        return EngineMemory(live, model, optim, world_size)
    if stage == 3:
        return PartitionedWeights(live, model, optim, world_size, on_gpu)
    return PartitionedState(live, model, optim, world_size, splits_gradients=stage == 2, on_gpu=on_gpu)


def _elements(tensors: list) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _of_fullest_rank(groups: list[dict], world_size: int) -> int:
    """Elements of the parameters that one rank's shards have a part of, whole, as ZeRO 1 and 2 keep their gradients."""
    return max(sum(map(sum, _touched(groups, world_size, rank))) for rank in range(world_size))


def _touched(groups: list[dict], world_size: int, rank: int) -> Iterator[list[int]]:
    for group in groups:
        shard = math.ceil(_elements(group["params"]) / world_size)
        ends, found = 0, []
        for parameter in group["params"]:
            begins, ends = ends, ends + parameter.numel()
            if begins < (rank + 1) * shard and ends > rank * shard:
                found.append(parameter.numel())
        yield found
