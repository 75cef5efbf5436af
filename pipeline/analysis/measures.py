"""Measure attention maps, and average what collectors see of a model in one pass over images.

A collector says which values it looks at (names of :mod:`pipeline.models.common.probe`) and adds what it makes of them, layer by
layer, to sums in float64, so that memory does not grow with the images. Every image counts once; over several ranks the sums are
added at the end, so that their number does not change a figure beyond rounding.

Maps are (..., N, N), query before key, on a grid of N = rows · columns tokens, row by row.

Φa is the mixed attention Φc ⊙ Φp as PerViT defines it below its Eq. 5, before its rows are normalized. Φc is exp(τ Q Kᵀ - row
maximum), as in the authors' code and as Appendix D says ("the input to the exponential function is normalized"): the factor cancels
in the layer's output, but not in a measure of Φc or Φa.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from pipeline.cluster.world import World
from pipeline.loader.batches import EvalBatches
from pipeline.loader.loader import Loader
from pipeline.models.common.probe import observed

Region = Literal["c", "p", "m", "f"]  # central, para-central, mid and far peripheral
REGIONS: tuple[Region, ...] = ("c", "p", "m", "f")
_ANGLES, _FIELD = (5, 40, 120, 220), 220  # degrees of the visual field (PerViT, Appendix B)


def query_key_distances(rows: int, columns: int, device: torch.device | None = None) -> Tensor:
    """R^euc: Euclidean distance of every query from every key, in patches.

    Returns:
        (N, N) float64.
    """
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    places = torch.stack([y, x], dim=-1).flatten(0, 1).double().to(device)  # (N, 2)
    return torch.cdist(places, places, compute_mode="donot_use_mm_for_euclid_dist")


def nonlocality(phi: Tensor, distances: Tensor) -> Tensor:
    """Ω: mean over all pairs of attention times distance, in patches (PerViT, Eq. 13).

    Args:
        phi: (..., N, N).
        distances: (N, N), see :func:`query_key_distances`.

    Returns:
        (...) float64.
    """
    return (phi.double() * distances).mean(dim=(-2, -1))


def mean_attention_distance(attention: Tensor, distances: Tensor) -> Tensor:
    """D_loc: distance from the query at which a head looks, in patches, mean over queries (ConViT, Eq. 8).

    Args:
        attention: (..., N, N), rows sum to 1.
        distances: (N, N).

    Returns:
        (...) float64: N times :func:`nonlocality`.
    """
    return (attention.double() * distances).sum(dim=(-2, -1)) / distances.shape[0]


def impact(phi: Tensor, mixed: Tensor) -> Tensor:
    """Ψ: inverse of the Frobenius distance of one attention from the mixed one (PerViT, Eq. 12).

    Args:
        phi: (..., N, N), Φp or Φc.
        mixed: (..., N, N), Φa.

    Returns:
        (...) float64; infinite where both are equal.
    """
    return torch.linalg.matrix_norm(mixed.double() - phi.double()).reciprocal()


def region_radii(rows: int, columns: int) -> tuple[float, float, float, float]:
    """Outer radii of the four peripheral regions, in patches (PerViT, Eq. 37 and 38): a disc of radius r covers the part of the
    grid that its angle is of the visual field's 220°. 1.19, 3.37, 5.83 and 7.90 on 14 x 14."""
    return tuple(math.sqrt(rows * columns * angle / (_FIELD * math.pi)) for angle in _ANGLES)  # type: ignore[return-value]


def region_scores(phi: Tensor, rows: int, columns: int) -> Tensor:
    """The bracket of PerViT's Eq. 11: attention that falls into each region, mean over all pairs.

    Args:
        phi: (..., N, N).
        rows, columns: of the grid.

    Returns:
        (..., 4) float64, in the order of :data:`REGIONS`. Pairs beyond the last radius count nowhere.
    """
    distances = query_key_distances(rows, columns, phi.device)
    inner, scores = 0.0, []
    for outer in region_radii(rows, columns):
        inside = (distances >= inner) & (distances < outer)  # (N, N)
        scores.append((phi.double() * inside).mean(dim=(-2, -1)))
        inner = outer
    return torch.stack(scores, dim=-1)


def rounded(values: Tensor, digits: int = 5) -> Any:
    """Nested lists with so many significant digits, for ``analysis.json``; None for what is not finite, which JSON cannot hold."""

    def convert(value: Any) -> Any:
        if isinstance(value, list):
            return [convert(item) for item in value]
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None

    return convert(values.tolist())


def finite(values: Tensor) -> Any:
    """Nested lists, in full precision; None for what is not finite."""
    return rounded(values, 17)


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
