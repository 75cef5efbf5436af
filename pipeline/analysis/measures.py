"""Measure attention maps, and average what collectors see of a model in one pass over images.

A collector says which values it looks at (names of :mod:`pipeline.models.common.probe`) and adds what it makes of them, layer by
layer, to sums in float64, so that memory does not grow with the images. Every image counts once; over several ranks the sums are
added at the end, so that their number does not change a figure beyond rounding.

Maps are (..., N, N), query before key, on a grid of N = rows · columns tokens, row by row.

Φa is the mixed attention Φc ⊙ Φp as PerViT defines it below its Eq. 5, before its rows are normalized. Φc is exp(τ Q Kᵀ - row
maximum), as in the authors' code and as Appendix D says ("the input to the exponential function is normalized"): the factor cancels
in the layer's output, but not in a measure of Φc or Φa.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from pipeline.cluster.world import World
from pipeline.loader.batches import EvalBatches
from pipeline.loader.loader import Loader
from pipeline.models.common.probe import observed
from pipeline.terminal import Progress

REGIONS = ("c", "p", "m", "f")  # central, para-central, mid and far peripheral
_ANGLES, _FIELD = (5, 40, 120, 220), 220  # degrees of the visual field (PerViT, Appendix B)


def places(rows: int, columns: int, device: torch.device | None = None) -> Tensor:
    """Row and column of each patch of a grid: (N, 2) float64."""
    return torch.cartesian_prod(torch.arange(rows, device=device), torch.arange(columns, device=device)).double()


def distances_between(queries: Tensor, keys: Tensor) -> Tensor:
    """Euclidean distances of places (..., L, 2) from places (..., S, 2): (..., L, S), exactly 0 where they are the same."""
    return torch.cdist(queries, keys, compute_mode="donot_use_mm_for_euclid_dist")


def query_key_distances(rows: int, columns: int, device: torch.device | None = None) -> Tensor:
    """R^euc: distance of every query from every key of a grid, in patches: (N, N) float64."""
    return distances_between(places(rows, columns, device), places(rows, columns, device))


def patches_per_unit(rows: int) -> float:
    """Patches in the unit of PerViT's published Ω: its code measures in coordinates that go from -1 to 1 over a side, so 6.5 of 14."""
    return max(rows - 1, 1) / 2


def unit_distances(rows: int, columns: int, device: torch.device | None = None) -> Tensor:
    """:func:`query_key_distances` in coordinates of [-1, 1], as the authors of PerViT measure Ω (util/visualize.py): (N, N) float64."""
    return query_key_distances(rows, columns, device) / patches_per_unit(rows)


def nonlocality(phi: Tensor, distances: Tensor) -> Tensor:
    """Ω: mean over all pairs of attention (..., N, N) times distance (N, N), in its unit (PerViT, Eq. 13): (...) float64."""
    return (phi.double() * distances).mean(dim=(-2, -1))


def mean_attention_distance(attention: Tensor, distances: Tensor) -> Tensor:
    """D_loc: distance from the query at which a head looks, in patches, mean over queries (ConViT, Eq. 8): (...) float64. Of attention
    (..., N, N) whose rows sum to 1 it is N times :func:`nonlocality`."""
    return (attention.double() * distances).sum(dim=(-2, -1)) / distances.shape[0]


def impact(phi: Tensor, mixed: Tensor) -> Tensor:
    """Ψ: inverse of the Frobenius distance of Φp or Φc (..., N, N) from the mixed Φa; infinite if equal (PerViT, Eq. 12): (...) float64."""
    return torch.linalg.matrix_norm(mixed.double() - phi.double()).reciprocal()


def region_radii(rows: int, columns: int) -> tuple[float, float, float, float]:
    """Outer radii of the four peripheral regions, in patches (PerViT, Eq. 37 and 38): a disc of radius r covers the part of the
    grid that its angle is of the visual field's 220°. 1.19, 3.37, 5.83 and 7.90 on 14 x 14."""
    return tuple(math.sqrt(rows * columns * angle / (_FIELD * math.pi)) for angle in _ANGLES)  # type: ignore[return-value]


def region_masks(rows: int, columns: int, device: torch.device | None = None) -> Tensor:
    """Pairs of tokens in each of :data:`REGIONS`: (4, N, N) bool. Pairs beyond the last radius are in none."""
    distances, radii = query_key_distances(rows, columns, device), region_radii(rows, columns)
    return torch.stack([(distances >= inner) & (distances < outer) for inner, outer in pairwise((0.0, *radii))])


def region_scores(phi: Tensor, rows: int, columns: int) -> Tensor:
    """The bracket of PerViT's Eq. 11: attention (..., N, N) in each region, mean over all pairs: (..., 4) float64."""
    masks = region_masks(rows, columns, phi.device)
    return torch.stack([(phi.double() * inside).mean(dim=(-2, -1)) for inside in masks], dim=-1)


def plain(value: Any, digits: int = 17) -> Any:
    """Tensors, and lists and dictionaries of them, as JSON: floats with so many significant digits, None for infinity and NaN."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: plain(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, digits) for item in value]
    if not isinstance(value, float):
        return value
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


class Collector:
    """Base of what looks at a forward pass. ``layer`` is the number of the layer, from 0, that offers a value now.
    ``probes``: names of the values to look at, in the order in which a layer offers them. The last must be one that every
    layer offers exactly once: it ends the layer."""

    def __init__(self, *probes: str) -> None:
        self.probes = probes
        self.layer = 0
        self.sums: dict[str, Tensor] = {}  # float64, on the device; they are added up over the ranks
        self.count = 0  # images seen by all ranks, after the pass

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
        held = self.sums.get(name, total.new_zeros(0, *total.shape))
        if len(held) <= layer:  # a layer more
            held = torch.cat([held, held.new_zeros(layer + 1 - len(held), *total.shape)])
        held[layer] += total
        self.sums[name] = held

    def mean(self, name: str) -> Tensor:
        """(layers, ...) float64 on the CPU: the mean over all images, after the pass."""
        return (self.sums[name] / self.count).cpu()


class ImageMeasures(Collector):
    """Sums over images of measures per layer and head, (layers, heads) each by its name. ``probes``: by default ``attention``; before the
    last, layers may offer ``phi_p``: (heads, N, N), or for each image (B, heads, M, M)."""

    def __init__(self, grid: tuple[int, int], *probes: str) -> None:
        super().__init__(*(probes or ["attention"]))
        self.distances = query_key_distances(*grid)  # (N, N)
        self._phi_p: Tensor | None = None

    def see(self, name: str, value: Tensor) -> None:
        if name != self.probes[-1]:
            self._phi_p = value
            return
        self.distances = self.distances.to(value.device)
        phi_p, self._phi_p = self._phi_p, None
        # float64 of one image at a time; value is (B, heads, M, M), or (1, heads, M, M) where it depends on no image
        phis: Iterable[Tensor | None] = phi_p if phi_p is not None and phi_p.dim() == value.dim() else [phi_p] * len(value)
        images = [self.measures(one.double(), None if phi is None else phi.double()) for one, phi in zip(value, phis)]
        for measure in images[0]:
            per_image = torch.stack([found[measure] for found in images])  # (B, heads)
            self.add(measure, self.layer, per_image.expand(len(self.valid), -1))

    def patches(self, attention: Tensor) -> Tensor:
        """(heads, M, M) -> (heads, N, N): without a class token, which has no place."""
        tokens = len(self.distances)
        return attention[..., -tokens:, -tokens:]

    def measures(self, value: Tensor, phi_p: Tensor | None) -> dict[str, Tensor]:
        """Of one image: (heads, M, M) float64 -> name -> (heads,)."""
        raise NotImplementedError


class AttentionDistance(ImageMeasures):
    """Mean attention distance, ``distance``. A class token, as query and key, is left out; the rest's rows are normalized again."""

    def measures(self, value: Tensor, phi_p: Tensor | None) -> dict[str, Tensor]:
        patches = self.patches(value)
        return {"distance": mean_attention_distance(patches / patches.sum(-1, keepdim=True), self.distances)}


class PhiMeasures(ImageMeasures):
    """Ω of Φc and of Φa = Φc ⊙ Φp, ``omega_c`` and ``omega_a``, and with Φp Ψ of both, ``psi_p`` and ``psi_c``. Without, Φa is Φc.
    ``probe``: ``phi_c``; or ``attention``, softmax(Q Kᵀ + log Φp), of which Φc is exp(Q Kᵀ - row maximum over all tokens)."""

    def __init__(self, grid: tuple[int, int], probe: str, has_phi_p: bool) -> None:
        super().__init__(grid, *(["phi_p"] if has_phi_p else []), probe)
        self.distances = unit_distances(*grid)

    def measures(self, value: Tensor, phi_p: Tensor | None) -> dict[str, Tensor]:
        if self.probes[-1] == "attention":
            content = value if phi_p is None else value / phi_p
            value = content / content.amax(-1, keepdim=True)
        phi_c = self.patches(value)
        omega_c = nonlocality(phi_c, self.distances)
        if phi_p is None:
            return {"omega_c": omega_c, "omega_a": omega_c}
        phi_p = self.patches(phi_p)
        mixed = phi_c * phi_p
        psi = {"psi_p": impact(phi_p, mixed), "psi_c": impact(phi_c, mixed)}
        return {"omega_c": omega_c, "omega_a": nonlocality(mixed, self.distances), **psi}


class QueryMaps(Collector):
    """A query's attention to all patches, mean over images: ``mean("maps")`` is (layers, heads, rows, columns). ``query_row``:
    (..., M, M) -> (..., rows, columns), the query's part of what ``probe`` offers."""

    def __init__(self, query_row: Callable[[Tensor], Tensor], probe: str = "attention") -> None:
        super().__init__(probe)
        self._query_row = query_row

    def see(self, name: str, value: Tensor) -> None:
        self.add("maps", self.layer, self._query_row(value).expand(len(self.valid), -1, -1, -1))


@torch.no_grad()
def run_pass(
    forward: Callable[[Tensor], object], loader: Loader[EvalBatches], world: World, collectors: Sequence[Collector]
) -> int:
    """One pass of ``forward``, images (B, 3, H, W) -> anything, a model in eval mode and not compiled, over the loader's set.
    Collective. Returns the images seen by all ranks."""
    count = torch.zeros((), dtype=torch.float64, device=world.device)
    for _ in Progress(len(loader.batches), "analyzing", "batches", world.is_main):
        batch = next(loader)
        look(forward, batch.images, batch.valid, collectors)
        count += batch.valid.sum()
    return add_over_ranks(count, world, collectors)


@torch.no_grad()
def look(forward: Callable[[Tensor], object], images: Tensor, valid: Tensor, collectors: Sequence[Collector]) -> None:
    """Show one forward pass over images (B, 3, H, W) to the collectors. Args: valid: (B,) bool, False for those that must not count."""
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
    """Add up what all ranks have seen at the end of a pass, of which ``count`` () images are this rank's. Collective; returns all."""
    total = int(world.sum(count).item())
    for each in collectors:
        each.count = total
        for name in sorted(each.sums):  # the same order on all ranks
            world.sum(each.sums[name])
    return total
