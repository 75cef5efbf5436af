"""Name what is used of an engine, DeepSpeed's or ours, and find what its optimizer updates on this rank: a slice of each parameter.

Under ZeRO 1 to 3 the optimizer sees flat shards of many parameters, which begin and end anywhere within one. AdamW does not mind, since
it treats every element by itself; an optimizer that needs a whole parameter, its norm for example, must put the slices together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from pipeline.cluster.world import World

WrappedModel = TypeVar("WrappedModel", bound=nn.Module, covariant=True)


class Engine(Protocol[WrappedModel]):
    """What is used of ``deepspeed.DeepSpeedEngine``, which has no types: the whole dependence on DeepSpeed's interface. Without ZeRO
    (stage 0), :class:`~pipeline.optim.plain_engine.PlainEngine` has the same.

    Parameters under ZeRO-3 have more attributes (``ds_tensor``, ``ds_shape``); the functions below read those, and the
    flat shards of the optimizer.
    """

    @property
    def module(self) -> WrappedModel: ...

    @property
    def optimizer(self) -> Any:
        """PyTorch's optimizer under ZeRO 0, else DeepSpeed's around it, another class for each stage."""

    def __call__(self, images: Tensor, noise: Tensor | None = ...) -> Tensor:
        """The model's forward pass, with autocast where the config says so."""

    def backward(self, loss: Tensor) -> Any:
        """Accumulate the gradients of a micro-batch and reduce them over ranks. Collective."""

    def step(self) -> None:
        """End a micro-batch; after the last one of a step, take the step. Collective."""

    def empty_partition_cache(self) -> None:
        """ZeRO-3: release gathered parameters."""

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the next micro-batch is the last one of a step, instead of counting them."""

    def train(self, mode: bool = ...) -> Any: ...
    def eval(self) -> Any: ...
    def gradient_accumulation_steps(self) -> int: ...
    def is_gradient_accumulation_boundary(self) -> bool: ...
    def zero_optimization_stage(self) -> int: ...


@dataclass(frozen=True)
class Slice:
    """Consecutive elements of a flattened parameter, and where they are in a tensor that the optimizer updates."""

    name: str  # of the parameter
    shape: torch.Size  # of the whole parameter
    start: int  # first element in the flattened parameter
    tensor: Tensor  # that the optimizer updates: the parameter, or a flat shard of many
    offset: int  # first element in the flattened tensor
    count: int

    def of(self, values: Tensor) -> Tensor:
        """The slice's part of values that are laid out like ``tensor``: (count,), a view."""
        return values.detach().view(-1)[self.offset : self.offset + self.count]


def slice_of(engine: Engine, name: str, parameter: nn.Parameter) -> Slice | None:
    """The slice of a parameter that this rank's optimizer updates; None: it is frozen, or other ranks hold all of it."""
    if not parameter.requires_grad:
        return None
    stage, optimizer = engine.zero_optimization_stage(), engine.optimizer
    if stage == 0:
        return engine.slice_of(name, parameter)  # type: ignore[attr-defined]  # of PlainEngine
    if stage < 3:
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is None:
            return None
        place = mapping.get_hp_fragment_address()
        flat = optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
        return Slice(name, parameter.shape, mapping.lp_fragment_address.start, flat, place.start, place.numel)
    # ZeRO 3: one slice of each parameter on each rank, all of equal length, so that the last ones are padded.
    size, whole = parameter.ds_tensor.ds_numel, parameter.ds_numel  # type: ignore[attr-defined]  # set by DeepSpeed
    start = size * torch.distributed.get_rank()
    count = max(0, min(size, whole - start))
    if count == 0:
        return None
    group, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
    return Slice(name, parameter.ds_shape, start, optimizer.fp32_partitioned_groups_flat[group], offset, count)  # type: ignore[attr-defined]


def inner_optimizer(engine: Engine) -> torch.optim.Optimizer:
    """PyTorch's optimizer, without what DeepSpeed puts around it."""
    return engine.optimizer if engine.zero_optimization_stage() == 0 else engine.optimizer.optimizer


def skips_on_the_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it skips a step on its own if its ``found_inf`` is 1: GradScaler's interface to PyTorch's fused optimizers. Muon is one
    for other parameters only."""
    return getattr(optimizer, "_step_supports_amp_scaling", False) and not isinstance(optimizer, SliceOptimizer)


def updated_groups(engine: Engine) -> Iterator[tuple[dict[str, Any], Sequence[Tensor]]]:
    """Each parameter group with what the optimizer updates of it on this rank: its parameters, or one flat shard of all of them."""
    stage, optimizer, groups = engine.zero_optimization_stage(), engine.optimizer, inner_optimizer(engine).param_groups
    if stage == 3:
        for number, flat in enumerate(optimizer.fp32_partitioned_groups_flat):
            yield groups[optimizer.sub_group_to_group_id[number]], [flat]
        return
    for number, group in enumerate(groups):
        yield group, [optimizer.single_partition_of_fp32_groups[number]] if stage else group["params"]


@torch.no_grad()
def create_state(engine: Engine) -> None:
    """Let the optimizer create its state, by a step on gradients of zero; weights and state are then to be overwritten. Collective."""
    optimizer = inner_optimizer(engine)
    groups = optimizer.param_groups
    for group, tensors in list(updated_groups(engine)):  # a group at a time, as DeepSpeed steps
        for tensor in tensors:
            tensor.grad = torch.zeros_like(tensor)
        optimizer.param_groups = [{**group, "params": tensors}]
        optimizer.step()
        for tensor in tensors:
            tensor.grad = None
    optimizer.param_groups = groups


class SliceOptimizer(torch.optim.Optimizer):
    """Base of optimizers that need whole parameters. Until :meth:`place` says otherwise, each tensor is one parameter.

    Its parameter groups have ``names``, those of their parameters on all ranks.
    """

    shapes: dict[str, torch.Size]  # of whole parameters, by name, once they are placed
    _placed: dict[Tensor, list[Slice]] | None = None
    _split: frozenset[str] = frozenset()

    def place(self, engine: Engine, world: World) -> None:
        """Find out which parameters the engine has split over ranks. Collective."""
        parameters = dict(engine.module.named_parameters())
        self.shapes = {name: getattr(parameter, "ds_shape", parameter.shape) for name, parameter in parameters.items()}
        self._placed, partial = {}, []
        for name, parameter in parameters.items():
            if piece := slice_of(engine, name, parameter):
                self._placed.setdefault(piece.tensor, []).append(piece)
                if piece.count < piece.shape.numel():
                    partial.append(name)
        self._split = frozenset(name for names in world.gather(partial) for name in names)

    def slices_in(self, tensors: Sequence[Tensor]) -> Iterator[Slice]:
        """The slices of all parameters in some tensors that the optimizer updates."""
        for tensor in tensors:
            if self._placed is None:
                yield Slice("", tensor.shape, 0, tensor, 0, tensor.numel())
            else:
                yield from self._placed.get(tensor, [])

    def split_names(self, group: dict) -> list[str]:
        """The names of a group's parameters that are split over ranks, the same list on every rank."""
        return [name for name in group["names"] if name in self._split]

    def count_step(self, tensor: Tensor, kept: Sequence[str]) -> dict[str, Any]:
        """The tensor's state in this step, its ``step`` counted; in the first one, with zeros under the names ``kept``."""
        state: dict[str, Any] = self.state[tensor]
        if not state:  # the step is on the CPU: neither to count nor to read it may wait for a GPU
            state.update({"step": torch.tensor(0.0, device="cpu"), **{name: torch.zeros_like(tensor) for name in kept}})
        state["step"] += 1
        return state
