"""Lay out a model's parameters, and their gradients, in flat tensors: what is done to all of them is then one operation.

The order is that in which a backward pass completes gradients, the last layers first, so that a slice of the gradients can be summed over
the ranks while the others are still being computed. A group is in one piece, which elementwise optimizers update at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.optim.build import LR_SCALE

_ALIGNMENT = 64  # elements: a view begins at 256 bytes in float32 and at 128 in bf16, as kernels with vector loads want it
_ROW = 4096  # elements that a norm is summed over at once: PyTorch's sum of squares on a CPU is off by 5e-4 for 8 million
PARTS = 4  # of the gradients, about: few reductions, of which only the last one has nothing to overlap with


@dataclass
class Part:
    """Consecutive parameters, whose gradients are collected, and summed over the ranks, together."""

    numbers: range  # of its parameters in :attr:`FlatParameters.parameters`
    begin: int  # first element in the flat tensors
    end: int
    missing: int = field(default=0)  # gradients that the backward pass still owes; -1: it is collected


class FlatParameters:
    """The trained parameters, of which each becomes a view of ``weights``. What pads them is zero and stays so."""

    def __init__(self, param_groups: Sequence[dict[str, Any]]) -> None:
        self.parameters: list[nn.Parameter] = []  # in the order of the layout
        self.begins: dict[nn.Parameter, int] = {}  # first element of each in the flat tensors
        self.groups, size = [(0, 0)] * len(param_groups), 0  # first element of each group, and the one after its last
        for number in sorted(range(len(param_groups)), key=lambda number: _place(param_groups[number])):
            begin = size
            for parameter in reversed(param_groups[number]["params"]):
                self.parameters.append(parameter)
                self.begins[parameter] = size
                size += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
            self.groups[number] = begin, size
        size, like = -(-size // _ROW) * _ROW, self.parameters[0]
        self.weights = torch.zeros(size, dtype=torch.float32, device=like.device)  # (n,), as the gradients
        self.gradients = torch.zeros_like(self.weights)
        for parameter, view in zip(self.parameters, self.views(self.weights)):
            view.copy_(parameter.data)
            parameter.data = view
        self.parts = list(self._divided(size))

    def views(self, flat: Tensor, part: Part | None = None) -> list[Tensor]:
        """A view for each parameter, or for those of a part, of a flat tensor (n,) that begins with the first of them."""
        numbers, first = (part.numbers, part.begin) if part else (range(len(self.parameters)), 0)
        begins = [(each, self.begins[each] - first) for each in (self.parameters[number] for number in numbers)]
        return [flat[begin : begin + each.numel()].view(each.shape) for each, begin in begins]

    def gradient_norm(self) -> Tensor:
        """Euclidean norm of all gradients, ()."""
        return torch.linalg.vector_norm(torch.linalg.vector_norm(self.gradients.view(-1, _ROW), dim=1))

    def _divided(self, size: int) -> Iterator[Part]:
        first, begin, ends = 0, 0, [*list(self.begins.values())[1:], size]
        for number, end in enumerate(ends):
            if end == size or end - begin >= size / PARTS:
                yield Part(range(first, number + 1), begin, end)
                first, begin = number + 1, end


def _place(group: dict[str, Any]) -> tuple[float, int]:
    """Groups of the last layers first, which learn at the highest rate; of two for the same layers the larger one."""
    return -group.get(LR_SCALE, 1.0), -sum(parameter.numel() for parameter in group["params"])
