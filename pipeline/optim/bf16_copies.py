"""Keep one bf16 copy of all weights that autocast would cast one by one, in every step and again for their gradients."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.metrics import recording
from pipeline.optim.flat import FlatParameters

_TRIED = 2  # images of the forward pass that shows which weights are cast: as few as BatchNorm takes


class Bf16Copies:
    """Copies that stand in a model's modules instead of its weights during the micro-batches of a step.

    Results are those of autocast, to the bit: it casts a weight once a step, and the copy's gradient is what the backward pass of that
    cast is given. Weights that are also used in float32, such as LayerNorm's, have no copy.

    Args:
        model: in training mode.
        images, noise: of a micro-batch, whose first images a forward pass is tried with under autocast. Nothing of it stays.

    Attributes:
        leaves: copies by the number of their parameter in the layout.
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
