"""Train without ZeRO, each rank with all weights and moments: an engine beside DeepSpeed's, whose step never waits for a GPU.

Gradients go into one flat tensor (:mod:`pipeline.optim.flat`), slices of which are summed over the ranks during the backward pass. Its
norm, clipping, the decision whether a step is taken, and AdamW's update are a few operations on the device.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.cluster.waits import device_waits
from pipeline.cluster.world import World
from pipeline.config import Config, accumulation_steps
from pipeline.metrics import recording
from pipeline.optim.flat import FlatParameters, Part
from pipeline.optim.slices import Slice, skips_on_the_device

Model = TypeVar("Model", bound=nn.Module)


class PlainEngine(Generic[Model]):
    """Implements :class:`~pipeline.optim.slices.Engine` for ZeRO 0. Construction is collective: all take the weights of rank 0.

    Args:
        optimizer: its groups have the model's trained parameters.
        joined: whether each group may become one flat parameter, as it may for optimizers that ZeRO may slice.
    """

    def __init__(self, model: Model, optimizer: torch.optim.Optimizer, joined: bool, config: Config, world: World) -> None:
        self.module, self.optimizer = model, optimizer
        self.train, self.eval = model.train, model.eval
        self._micro_batches = accumulation_steps(config.train, world.size, config.augment.unit)
        self._clip_grad_norm, self._casts = config.optim.clip_grad_norm, config.train.precision == "bf16"
        self._autocast = partial(torch.autocast, world.device.type, torch.bfloat16, enabled=self._casts)
        self.flat = flat = FlatParameters(optimizer.param_groups)
        self._group = None
        if world.size > 1:
            self._group = dist.new_group(timeout=timedelta(seconds=config.distributed.collective_timeout))
            frozen = (parameter.data for parameter in model.parameters() if not parameter.requires_grad)
            for tensor in (flat.weights, *frozen, *model.buffers()):
                dist.broadcast(tensor, src=0)
        # The loss of a micro-batch is divided by this, so that a sum over micro-batches and ranks is their mean.
        self._divisor = self._micro_batches * world.size
        self._held: dict[nn.Parameter, tuple[Tensor, int]] = {}  # what the optimizer updates instead, and where in it
        self._updated = self._join() if joined else list(zip(flat.parameters, flat.views(flat.gradients)))
        self._skips = skips_on_the_device(optimizer)
        self._skips_left: Tensor | None = None  # (), see :meth:`decide_on_the_device`
        self._views = [flat.views(flat.gradients[part.begin : part.end], part) for part in flat.parts]
        self._added: tuple[Tensor, list[list[Tensor]]] | None = None  # a part's gradients of a later micro-batch, and views
        self._part_of = [part for part in flat.parts for _ in part.numbers]
        self._leaves: list[Tensor] = list(flat.parameters)  # that gradients arrive at: the parameters, or their copies
        self._copies: Bf16Copies | None = None
        self._watch(dict(enumerate(flat.parameters)))
        # Micro-batches of this step so far; whether the next is the last, if that was said.
        self._number, self._last_is = 0, cast("bool | None", None)
        self._running, self._reduced = False, 0  # a backward pass; parts of the gradients whose reduction has begun
        self._works: list[Any] = []  # their reductions

    def __call__(self, images: Any, *more: Any) -> Any:
        with self._autocast():
            return self.module(images, *more)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a micro-batch to the flat ones; those of the last one are summed over the ranks meanwhile."""
        for part in self.flat.parts:
            part.missing = len(part.numbers)
        self._running, self._reduced = True, 0
        try:
            (loss if self._divisor == 1 else loss / self._divisor).backward()
        finally:
            self._running = False
        for part in self.flat.parts:  # with parameters that this micro-batch has not used
            if part.missing > 0:
                self._collect(part)

    def step(self) -> None:
        """End a micro-batch that is not the last one of a step."""
        self._number += 1

    @torch.no_grad()
    def update(self) -> Tensor:
        """Clip the gradients and take the step, unless their norm is not finite; returns their norm before, (). Collective."""
        with device_waits():
            for work in self._works:
                work.wait()
        self._works, self._number, self._last_is = [], 0, None
        norm = self.flat.gradient_norm()
        if self._skips_left is not None:
            norm = norm.masked_fill_(self._skips_left < 0, math.inf)
        taken = norm < math.inf
        if self._skips_left is not None:
            self._skips_left.add_(taken).sub_(1)
        if self._clip_grad_norm:  # as torch.nn.utils.clip_grad_norm_; what pads the parameters must not become NaN
            self.flat.gradients.mul_((self._clip_grad_norm / (norm + 1e-6)).clamp_(max=1).nan_to_num_(0.0))
        for tensor, gradient in self._updated:
            tensor.grad = gradient
        if self._skips:
            self.optimizer.found_inf = 1 - taken.float()  # type: ignore[attr-defined]
            self.optimizer.step()
            del self.optimizer.found_inf  # type: ignore[attr-defined]
        elif taken:  # waits for the device
            self.optimizer.step()
        for tensor, _ in self._updated:
            tensor.grad = None
        return norm

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold a step: its one micro-batch, and an optimizer that asks the host for nothing."""
        return self._micro_batches == 1 and self._skips and "capturable" in self.optimizer.defaults

    def decide_on_the_device(self, skips: int) -> None:
        """Keep on the device what a captured step cannot ask the host for: each group's learning rate, and how many ``skips`` are still
        allowed. The host hears of the one that is too many when the next step is under way, which changes nothing then."""
        device = self.flat.weights.device
        for group in self.optimizer.param_groups:
            group["lr"], group["capturable"] = torch.zeros((), device=device), True
        self._skips_left = torch.tensor(skips, device=device)

    def break_off(self) -> None:
        """Drop what a step that an exception has ended left behind."""
        copies = self._copies.leaves.values() if self._copies else ()
        for tensor in (*self.flat.parameters, *copies, *(tensor for tensor, _ in self._updated)):
            tensor.grad = None
        self._works, self._number, self._last_is = [], 0, None

    @contextmanager
    def computing_weights(self) -> Iterator[None]:
        """In the block, the micro-batches of a step, bf16 copies of weights stand in the model instead of its parameters."""
        self._install()
        try:
            yield
        finally:
            if self._copies:
                self._copies.remove()
                self._leaves = list(self.flat.parameters)

    def prepare(self, images: Tensor, noise: Tensor | None) -> None:
        """Before the first micro-batch of a start, and before anything is compiled, in which casts cannot be seen: make the copies
        of :meth:`computing_weights`, in whose block this is called."""
        if self._casts and self._copies is None:
            self._copies = Bf16Copies(self.module, self.flat, images, noise)
            self._watch(self._copies.leaves)
            self._install()

    def slice_of(self, name: str, parameter: nn.Parameter) -> Slice:
        """The parameter in what the optimizer updates."""
        tensor, offset = self._held.get(parameter, (parameter, 0))
        return Slice(name, parameter.shape, 0, tensor, offset, parameter.numel())

    def empty_partition_cache(self) -> None:
        """Nothing is gathered."""

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self._last_is = is_boundary

    def is_gradient_accumulation_boundary(self) -> bool:
        return self._number == self._micro_batches - 1 if self._last_is is None else self._last_is

    def gradient_accumulation_steps(self) -> int:
        return self._micro_batches

    def zero_optimization_stage(self) -> int:
        return 0

    def _join(self) -> list[tuple[Tensor, Tensor]]:
        """Make each parameter group one flat parameter; returns these, with their gradients."""
        updated: list[tuple[Tensor, Tensor]] = []
        for group, (begin, end) in zip(self.optimizer.param_groups, self.flat.groups):
            if begin < end:
                joined = nn.Parameter(self.flat.weights[begin:end])
                self._held.update({parameter: (joined, self.flat.begins[parameter] - begin) for parameter in group["params"]})
                group["params"] = [joined]
                updated.append((joined, self.flat.gradients[begin:end]))
        return updated

    def _install(self) -> None:
        if self._copies:
            self._copies.install()
            for number, copy in self._copies.leaves.items():
                self._leaves[number] = copy

    def _watch(self, leaves: Mapping[int, nn.Parameter]) -> None:
        """Hear of the gradients of leaves, which are given by the numbers of their parameters."""
        for number, leaf in leaves.items():
            leaf.register_post_accumulate_grad_hook(partial(self._arrived, self._part_of[number]))

    def _arrived(self, part: Part, leaf: Tensor) -> None:
        if self._running:  # else it is somebody else's backward pass
            part.missing -= 1
            if part.missing == 0:
                self._collect(part)

    @torch.no_grad()
    def _collect(self, part: Part) -> None:
        """Move the gradients of a part to the flat ones, and after the last micro-batch begin to sum those over the ranks."""
        number, flat = self.flat.parts.index(part), self.flat.gradients[part.begin : part.end]
        views = self._views[number]
        if self._number:
            if self._added is None:
                largest = max(part.end - part.begin for part in self.flat.parts)
                added = torch.zeros(largest, dtype=flat.dtype, device=flat.device)
                self._added = added, [self.flat.views(added, part) for part in self.flat.parts]
            self._added[0].zero_()  # another part lies between these parameters
            views = self._added[1][number]
        gradients = [self._leaves[index].grad for index in part.numbers]
        for dtype in (torch.float32, torch.bfloat16):  # one operation for each type
            if pairs := [(view, found) for view, found in zip(views, gradients) if found is not None and found.dtype is dtype]:
                torch._foreach_copy_([view for view, _ in pairs], [found for _, found in pairs])
        if unused := [view for view, found in zip(views, gradients) if found is None]:
            torch._foreach_zero_(unused)
        for index in part.numbers:
            self._leaves[index].grad = None
        if self._number and self._added:
            flat.add_(self._added[0][: len(flat)])
        part.missing = -1
        if self._group and self.is_gradient_accumulation_boundary():
            # In the same order on every rank, whatever the order in which they were completed.
            while self._reduced < len(self.flat.parts) and (ready := self.flat.parts[self._reduced]).missing < 0:
                slice_ = self.flat.gradients[ready.begin : ready.end]
                self._works.append(dist.all_reduce(slice_, group=self._group, async_op=True))
                self._reduced += 1


_TRIED = 2  # images of the forward pass that shows which weights are cast: as few as BatchNorm takes


class Bf16Copies:
    """Copies that stand in a model's modules instead of its weights during the micro-batches of a step.

    Results are those of autocast, to the bit: it casts a weight once a step, and the copy's gradient is what the backward pass of that
    cast is given. Weights that are also used in float32, such as LayerNorm's, have no copy.

    Args:
        model: in training mode.
        images, noise: of a micro-batch, whose first images a forward pass is tried with under autocast. Nothing of it stays.
    """

    def __init__(self, model: nn.Module, flat: FlatParameters, images: Tensor, noise: Tensor | None) -> None:
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        with recording(), torch.autocast(images.device.type, torch.bfloat16):
            scores = model(images[:_TRIED], None if noise is None else noise[:_TRIED])
        torch.clear_autocast_cache()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        cast, self._weights = _only_cast(scores.grad_fn), flat.weights
        self._flat = torch.empty_like(flat.weights, dtype=torch.bfloat16)
        views = zip(flat.parameters, flat.views(self._flat))
        # Copies by the number of their parameter in the layout.
        self.leaves = {number: nn.Parameter(view) for number, (weight, view) in enumerate(views) if weight in cast}
        copies = {flat.parameters[number]: copy for number, copy in self.leaves.items()}
        self._places: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []  # a module's parameters, name, weight, copy
        for parameters in (module._parameters for module in model.modules()):
            found = [(name, weight) for name, weight in parameters.items() if weight in copies]
            self._places += [(parameters, name, weight, copies[weight]) for name, weight in found]

    @torch.no_grad()
    def install(self) -> None:
        """Copy the present weights, and put the copies into the modules."""
        self._flat.copy_(self._weights)
        for parameters, name, _, copy in self._places:
            parameters[name] = copy

    def remove(self) -> None:
        """Put the weights back."""
        for parameters, name, weight, _ in self._places:
            parameters[name] = weight


def _only_cast(root: Any) -> set[Tensor]:
    """The leaves of autograd's graph that every operation uses in bf16."""
    uses: defaultdict[Tensor, set[bool]] = defaultdict(set)  # of a leaf: whether it was cast
    seen, pending = {root}, [root]
    while pending:
        node = pending.pop()
        for used in (used for used, _ in node.next_functions if used is not None):
            if hasattr(used, "variable"):
                uses[used.variable].add(node.name() == "ToCopyBackward0" and node._input_metadata[0].dtype is torch.bfloat16)
            elif used not in seen:
                seen.add(used)
                pending.append(used)
    return {leaf for leaf, casts in uses.items() if casts == {True}}
