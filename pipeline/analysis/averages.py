"""Pass over images and add up inner values of a model, layer by layer, so that memory does not grow with the images.

A collector says which values it looks at (names of :mod:`pipeline.models.common.probe`) and adds what it makes of them to sums in
float64. Every image counts once; over several ranks the sums are added at the end, so that their number does not change a figure
beyond rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from pipeline.cluster.world import World
from pipeline.loader.batches import EvalBatches
from pipeline.loader.loader import Loader
from pipeline.models.common.probe import observed


class Collector:
    """Base of what looks at a forward pass. ``layer`` is the number of the layer, from 0, that offers a value now.

    Args:
        probes: names of the values to look at, in the order in which a layer offers them. The last must be one that every layer
            offers exactly once: it ends the layer.

    Attributes:
        sums: name -> float64 tensor on the device; :meth:`add` creates and adds. All are summed over the ranks.
        count: images seen by all ranks, after the pass.
    """

    def __init__(self, *probes: str) -> None:
        self.probes = probes
        self.layer = 0
        self.sums: dict[str, Tensor] = {}
        self.count = 0

    def begin(self, valid: Tensor) -> None:
        """Before a batch. Args: valid: (B,) bool, False for padding, which must not count."""
        self.layer, self.valid = 0, valid

    def see(self, name: str, value: Tensor) -> None:
        """A layer offers a value: (B, heads, N, N) for those of images."""
        raise NotImplementedError

    def add(self, name: str, layer: int, per_image: Tensor) -> None:
        """Add a value of each image (B, ...) to ``sums[name][layer]``; padding does not count."""
        mask = self.valid.view(-1, *[1] * (per_image.dim() - 1))  # (B, 1, ...)
        total = per_image.double().where(mask, 0.0).sum(0)  # (...)
        held = self.sums.get(name)
        if held is None or len(held) <= layer:  # a layer more
            grown = torch.zeros(layer + 1, *total.shape, dtype=torch.float64, device=total.device)
            if held is not None:
                grown[: len(held)] = held
            self.sums[name] = held = grown
        held[layer] += total

    def mean(self, name: str) -> Tensor:
        """(layers, ...) float64 on the CPU: the mean over all images, after the pass."""
        return (self.sums[name] / self.count).cpu()


@torch.no_grad()
def run_pass(
    forward: Callable[[Tensor], object],
    loader: Loader[EvalBatches],
    world: World,
    collectors: Sequence[Collector],
    progress: Callable[[range], Iterable[int]] = lambda batches: batches,
) -> int:
    """One pass over the loader's set. Collective.

    Args:
        forward: images (B, 3, H, W) -> anything; a model in eval mode, not compiled.
        loader: an evaluation's, from :func:`pipeline.inference.evaluation.evaluation_loader`.
        world: all ranks.
        collectors: each sees the values that it names.
        progress: wraps the range of batches, as tqdm does.

    Returns:
        Images seen by all ranks.
    """
    count = torch.zeros((), dtype=torch.float64, device=world.device)
    for _ in progress(range(len(loader.batches))):
        batch = next(loader)
        look(forward, batch.images, batch.valid, collectors)
        count += batch.valid.sum()
    return add_over_ranks(count, world, collectors)


@torch.no_grad()
def look(forward: Callable[[Tensor], object], images: Tensor, valid: Tensor, collectors: Sequence[Collector]) -> None:
    """Show one forward pass to the collectors.

    Args:
        forward: as in :func:`run_pass`.
        images: (B, 3, H, W).
        valid: (B,) bool, False for images that must not count.
        collectors: each sees the values that it names.
    """
    names = {name for each in collectors for name in each.probes}

    def observe(name: str, value: Tensor) -> None:
        for each in collectors:
            if name in each.probes:
                each.see(name, value)
                each.layer += name == each.probes[-1]

    for each in collectors:
        each.begin(valid)
    with observed(observe, *names):
        forward(images)


def add_over_ranks(count: Tensor, world: World, collectors: Sequence[Collector]) -> int:
    """Add up what all ranks have seen, at the end of a pass. Collective.

    Args:
        count: (), images that counted on this rank.

    Returns:
        Images of all ranks.
    """
    total = int(world.sum(count).item())
    for each in collectors:
        each.count = total
        for name in sorted(each.sums):  # the same order on all ranks
            world.sum(each.sums[name])
    return total
