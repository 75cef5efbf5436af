"""Networks as users write them: a file that the package knows nothing of, ``model.name=support.their_nets:Net``, and what a run refuses."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn


class DropPath(nn.Module):
    """Stochastic depth, as many repositories have it."""

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.drop_prob:
            return x
        keep = 1 - self.drop_prob
        mask = torch.rand(x.shape[0], *[1] * (x.ndim - 1), dtype=x.dtype, device=x.device)
        return x / keep * (mask + keep).floor()


class Block(nn.Module):
    def __init__(self, width: int, drop_path: float) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop_path(self.norm(self.conv(x)).relu())


class Net(nn.Module):
    """Two residual blocks on patches of 4 x 4 pixels."""

    def __init__(self, num_classes: int, drop_path: float = 0.0, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.Sequential(*(Block(width, drop_path) for _ in range(2)))
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.dropout(self.blocks(self.stem(images)).mean(dim=(2, 3))))


def small(num_classes: int, image_size: int, **options: float) -> nn.Module:
    """A function that asks for the size of the images."""
    assert image_size % 4 == 0, "the sides must be multiples of 4"
    return Net(num_classes, **options)


def torso(num_classes: int) -> nn.Module:
    return Net(num_classes + 1)


def nothing(num_classes: int) -> dict:
    return {"classes": num_classes}


@functools.cache
def _kept(num_classes: int) -> nn.Module:
    return Net(num_classes)


def same(num_classes: int) -> nn.Module:
    return _kept(num_classes)


def tied(num_classes: int) -> nn.Module:
    net = Net(num_classes)
    net.blocks[1].conv.weight = net.blocks[0].conv.weight
    return net


def lazy(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))


def half(num_classes: int) -> nn.Module:
    return Net(num_classes).half()


class Counts(Net):
    """Counts its images in a buffer."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        self.seen += len(images)
        return super().forward(images)
