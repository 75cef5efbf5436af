"""Attention of LSAT (Sheynin et al., 2021): the weights of the shifted variants in local attention, distances in global attention.

Weights W_i (Eq. 3) say how much each of the T variants of patch i enters into the patch; they depend on the image. A variant's shift
(down, right) moves the image's content, so that its patch lies at (-down, -right) pixels from the unshifted one: figures show where
the patch lies. The paper draws neither; the measures are stated here.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from pipeline.analysis.chapter import Chapter, Drawn, Example, Findings, Request, figure
from pipeline.analysis.chapters import lsat_figures as figures
from pipeline.analysis.measures import Collector, query_key_distances
from pipeline.models.common.base import VisionModel
from pipeline.models.common.layers import to_windows
from pipeline.models.common.probe import observed
from pipeline.models.lsat.blocks import AnyBlock
from pipeline.models.lsat.model import LSAT
from pipeline.models.lsat.shifts import Shift, ShiftEmbedding, grid_side
from pipeline.models.lsat.table6 import KEY_VALUE_STRIDE, CvTBlock, SwinBlock

Grid = tuple[int, int]  # (rows, columns) of patches
_NO_SUCH = "Eq. 3 (the paper has no such figure)"


def shift_distance(weights: Tensor, shifts: Tensor) -> Tensor:
    """Distance of a variant's patch from the unshifted one, mean over variants by their weight: Σ_s W_is |shift_s|.

    Args:
        weights: (..., T), rows sum to 1 (Eq. 3).
        shifts: (T, 2) in pixels.

    Returns:
        (...) float64, pixels.
    """
    return (weights.double() * torch.linalg.vector_norm(shifts.double(), dim=-1)).sum(-1)


def used_shifts(weights: Tensor) -> Tensor:
    """How many variants a patch uses: exp of the entropy of W_i, from 1 (a single one) to T (all alike).

    Args:
        weights: (..., T), rows sum to 1.

    Returns:
        (...) float64.
    """
    return torch.special.entr(weights.double()).sum(-1).exp()


def pair_distances(block: AnyBlock, grid: Grid, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Distances of a block's queries from its keys in patches, in the layout of its probe ``attention``.

    Args:
        block: a global block, or one of Table 6. CvT's keys are every second patch along both axes.
        grid: of its patches.

    Returns:
        distances (groups, L, S) float64; queries (groups, L) bool, False for the padding of Swin's windows.
    """
    if isinstance(block, SwinBlock):
        rows, columns = (-(-size // block.window) * block.window for size in grid)
        places = _places(rows, columns, device).unflatten(0, (1, rows, columns))
        windows = to_windows(places, block.window, block.shift)[0]  # (windows, N, 2)
        inside = (windows < torch.tensor(grid, device=device)).all(-1)  # (windows, N)
        return _distances(windows, windows), inside
    if isinstance(block, CvTBlock):
        rows, columns = (-(-size // KEY_VALUE_STRIDE) for size in grid)
        distances = _distances(_places(*grid, device)[None], KEY_VALUE_STRIDE * _places(rows, columns, device)[None])
    else:
        distances = query_key_distances(*grid, device)[None]
    return distances, torch.ones(distances.shape[:2], dtype=torch.bool, device=device)


def _places(rows: int, columns: int, device: torch.device | None) -> Tensor:
    """(rows * columns, 2) float64: row and column of each patch."""
    y, x = torch.meshgrid(torch.arange(rows, device=device), torch.arange(columns, device=device), indexing="ij")
    return torch.stack([y, x], dim=-1).flatten(0, 1).double()


def _distances(queries: Tensor, keys: Tensor) -> Tensor:
    return torch.cdist(queries, keys, compute_mode="donot_use_mm_for_euclid_dist")


class LSATAttention(Collector):
    """Over images: weights of the variants by head and patch, what :func:`shift_distance` and :func:`used_shifts` make of them, and
    the mean attention distance (ConViT, Eq. 8) of every other layer and head.

    Sums: ``weights`` (1, heads, N, T), ``shift_distance`` and ``used_shifts`` (1, heads), ``distance_<layer>`` (1, heads).
    """

    def __init__(self, blocks: list[tuple[AnyBlock, Grid]], shifts: Tensor | None) -> None:
        super().__init__("attention")
        self.blocks, self.shifts = blocks, shifts
        self._of_layer: tuple[int, Tensor, Tensor] | None = None  # one at a time: 79 MB for LSAT-S's first level

    def see(self, name: str, value: Tensor) -> None:
        if self.layer == 0 and self.shifts is not None:
            weights, self.shifts = value.squeeze(3), self.shifts.to(value.device)  # (B, heads, N, T)
            self.add("weights", 0, weights)
            self.add("shift_distance", 0, shift_distance(weights, self.shifts).mean(-1))
            self.add("used_shifts", 0, used_shifts(weights).mean(-1))
            return
        distances, queries = self._geometry(value.device)
        # One image at a time: in double precision, a batch of them would not fit for 3136 patches.
        of_queries = torch.stack([(each.double() * distances).sum(-1) for each in value])  # (B, heads, groups, L)
        self.add(f"distance_{self.layer}", 0, (of_queries * queries).sum((-2, -1)) / queries.sum())

    def _geometry(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._of_layer is None or self._of_layer[0] != self.layer:
            self._of_layer = (self.layer, *pair_distances(*self.blocks[self.layer], device))
        return self._of_layer[1], self._of_layer[2]


class LSATChapter(Chapter):
    """Weights of the shifted variants per head and place, and mean attention distance of the other layers."""

    model: LSAT

    @classmethod
    def applies(cls, model: VisionModel) -> bool:
        return isinstance(model, LSAT)

    def make_collectors(self) -> list[Collector]:
        self._attention = LSATAttention(self._blocks, self._shifts if len(self._shifts) > 1 else None)
        return [self._attention]

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        side = request.image_size // self.model.stride
        grids = [(grid_side(side, level),) * 2 for level in range(len(self.model.levels))]
        self._grid = grids[0]
        self._levels = [i for i, level in enumerate(self.model.levels, start=1) for _ in level.blocks]
        self._blocks = [(block, grid) for level, grid in zip(self.model.levels, grids) for block in level.blocks]
        embedding = self.model.embedding
        shifts: tuple[Shift, ...] = embedding.shift_set.shifts if isinstance(embedding, ShiftEmbedding) else ((0, 0),)
        self._shifts = torch.tensor(shifts)  # (T, 2)
        self._equal = f"{1 / len(shifts):.1%}"

    def lacks(self, name: str) -> str | None:
        if not name.startswith("shift_") or len(self._shifts) > 1:
            return None
        local = self.model.switches.local
        why = "model.switches.shifts: none" if local == "lsa" else f"model.switches.local: {local}"
        return f"The model has no shifted variants ({why}): its first block attends from patch to patch."

    def measure(self, findings: Findings) -> None:
        if len(self._shifts) > 1:
            findings.measure("shifts", self._shifts, "[shift][down, right], pixels by which the image's content moves")

    @figure("shift_weights", "Which shifted variants a patch attends to", f"LSAT, Sec. 3.2 and {_NO_SUCH}", needs="images")
    def _shift_weights(self, findings: Findings) -> Drawn:
        weights = self._attention.mean("weights")[0]  # (heads, N, T)
        findings.measure("shift_weights", weights.mean(1)[None], "[layer][head][shift], share; mean over images and patches")
        for name, unit in (
            ("shift_distance", "[layer][head], pixels"),
            ("used_shifts", "[layer][head], shifts: exp of the entropy of Eq. 3"),
        ):
            findings.measure(name, self._attention.mean(name), unit)
        return Drawn(
            "Weight of each variant in local attention (Eq. 3), mean over images and patches, one panel per head of the only local "
            "layer. A square stands where the variant's patch lies, in pixels from the unshifted one, which is framed; equal "
            f"weights would be {self._equal} each. White: not among the model's {len(self._shifts)} shifts.",
            partial(figures.shift_planes, weights.mean(1), self._shifts),
        )

    @figure("shift_weights_by_place", "Weights of the shifted variants over the image", f"LSAT, {_NO_SUCH}", needs="images")
    def _by_place(self, findings: Findings) -> Drawn:
        maps = self._attention.mean("weights")[0].transpose(1, 2).unflatten(-1, self._grid)  # (heads, T, rows, columns)
        unit = "[head][shift][row][column of the patch], share; mean over images"
        findings.measure("shift_weights_by_place", maps.round(decimals=6), unit)
        return Drawn(
            "The same weights for every patch, mean over images: one map of all patches for each head and variant, which is named by "
            "where its patch lies (pixels down, right).",
            partial(figures.shift_maps, maps, self._shifts),
        )

    @figure("shift_offsets_on_images", "Where each patch looks, on images", f"LSAT, {_NO_SUCH}", needs="examples")
    def _offsets(self, findings: Findings) -> Drawn:
        examples, shifts = list(self.request.examples), self._shifts
        weights = [self._weights_of(example) for example in examples]  # (heads, N, T) each
        self._first = weights[0].transpose(1, 2).unflatten(-1, self._grid)  # (heads, T, rows, columns)
        equal = -shifts.double().mean(0)  # (2,): not 0, for the sets have more shifts to one side
        offsets = [
            (of_image @ -shifts.double() - equal).unflatten(1, self._grid) for of_image in weights
        ]  # (heads, rows, columns, 2)
        for name, value, unit in (
            ("keys", [example.key for example in examples], "[example]"),
            (
                "offsets",
                [of_image.round(decimals=4).tolist() for of_image in offsets],
                "[example][head][row][column of the patch][down, right], pixels from where equal weights look",
            ),
            (
                "weights",
                self._first.round(decimals=6),
                "[head][shift][row][column of the patch] of the first example, share",
            ),
        ):
            findings.measure(f"shift_examples.{name}", value, unit)
        return Drawn(
            "Mean place of a patch's variants by their weights, from the place that equal weights would give "
            f"({equal[0]:+.2f} pixels down, {equal[1]:+.2f} right of the patch), one column per head. Arrows point there, all at one "
            "scale, larger than they are; colours are their length in pixels.",
            partial(figures.offsets_on_images, examples, offsets),
        )

    @figure("shift_weights_on_image", "Weights of the shifted variants on an image", f"LSAT, {_NO_SUCH}", needs="examples")
    def _on_image(self, findings: Findings) -> Drawn:
        example = self.request.examples[0]
        return Drawn(
            f"Weight of every variant (columns, named by where its patch lies: pixels down, right) at every patch of {example.key}, "
            f"by head. At each patch the weights of a row sum to 1; equal weights would be {self._equal}.",
            partial(figures.weights_on_image, example, self._first, self._shifts),
        )

    @torch.no_grad()
    def _weights_of(self, example: Example) -> Tensor:
        """(heads, N, T) float64 on the CPU: the weights W_i of an image."""
        found: list[Tensor] = []

        def keep_first(_: str, value: Tensor) -> None:
            if not found:
                found.append(value[0, :, :, 0].double().cpu())

        with observed(keep_first, "attention"):
            self.model(example.image[None])
        return found[0]

    @figure(
        "attention_distance",
        "How far the heads of global attention look",
        "the measure is that of ConViT, Fig. 5",
        needs="images",
    )
    def _distances(self, findings: Findings) -> Drawn:
        first = int(len(self._shifts) > 1)
        layers = range(first, len(self._blocks))
        distances = [self._attention.mean(f"distance_{layer}")[0] for layer in layers]
        equal = []
        for layer in layers:
            pairs, queries = pair_distances(*self._blocks[layer])
            equal.append(pairs[queries].mean().item())
        local: list[None] = [None] * first
        by_layer = [*local, *(each.tolist() for each in distances)]
        findings.measure("mean_attention_distance", by_layer, "[layer][head], patches of the level; null: the local layer")
        findings.measure(
            "mean_attention_distance_uniform",
            [*local, *equal],
            "[layer], patches of the level: of equal weights over all keys; null: the local layer",
        )
        findings.measure("mean_attention_distance_levels", self._levels, "[layer], from 1")
        return Drawn(
            "Mean distance between a query and what it attends to (ConViT, Eq. 8), in patches of the level, whose side doubles from one "
            "to the next. One bar per head; the dashed line is equal attention to all keys.",
            partial(figures.distances, distances, equal, self._levels[first:], first),
        )
