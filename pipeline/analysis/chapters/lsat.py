"""Attention of LSAT (Sheynin et al., 2021): the weights of the shifted variants in local attention, distances in global attention.

Weights W_i (Eq. 3) say how much each of the T variants of patch i enters into the patch; they depend on the image. A variant's shift
(down, right) moves the image's content, so that its patch lies at (-down, -right) pixels from the unshifted one: figures show where
the patch lies. The paper draws neither; the measures are stated here.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from pipeline.analysis.averages import Collector
from pipeline.analysis.chapter import Chapter, Example
from pipeline.analysis.chapters import lsat_figures as figures
from pipeline.analysis.findings import Findings, Plot
from pipeline.analysis.measures import query_key_distances
from pipeline.models.common.base import VisionModel
from pipeline.models.common.probe import observed
from pipeline.models.common.windows import to_windows
from pipeline.models.lsat.blocks import AnyBlock
from pipeline.models.lsat.cvt import KEY_VALUE_STRIDE, CvTBlock
from pipeline.models.lsat.layout import grid_side
from pipeline.models.lsat.model import LSAT
from pipeline.models.lsat.shifts import Shift, ShiftEmbedding
from pipeline.models.lsat.swin import SwinBlock

Grid = tuple[int, int]  # (rows, columns) of patches
NO_IMAGES = "It needs images: pass --data."
_LOCAL_FIGURES = ("shift_weights", "shift_weights_by_place", "shift_offsets_on_images", "shift_weights_on_image")


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

    def collectors(self) -> list[Collector]:
        side = self.request.image_size // self.model.stride
        grids = [(grid_side(side, level),) * 2 for level in range(len(self.model.levels))]
        self._grid = grids[0]
        self._levels = [i for i, level in enumerate(self.model.levels, start=1) for _ in level.blocks]
        self._blocks = [(block, grid) for level, grid in zip(self.model.levels, grids) for block in level.blocks]
        embedding = self.model.embedding
        shifts: tuple[Shift, ...] = embedding.shift_set.shifts if isinstance(embedding, ShiftEmbedding) else ((0, 0),)
        self._shifts = torch.tensor(shifts) if len(shifts) > 1 else None
        self._attention = LSATAttention(self._blocks, self._shifts)
        return [self._attention]

    def add_findings(self, findings: Findings) -> None:
        if self._shifts is None:
            reason = (
                f"The model has no shifted variants ({self._without_variants()}): its first block attends from patch to patch."
            )
            findings.omitted.update(dict.fromkeys(_LOCAL_FIGURES, reason))
        else:
            findings.measure("shifts", self._shifts, "[shift][down, right], pixels by which the image's content moves")
            self._add_averages(findings, self._shifts)
            self._add_examples(findings, self._shifts)
        self._add_distances(findings)

    def _without_variants(self) -> str:
        local = self.model.switches.local
        return "model.switches.shifts: none" if local == "lsa" else f"model.switches.local: {local}"

    def _add_averages(self, findings: Findings, shifts: Tensor) -> None:
        if self._attention.count == 0:
            findings.omitted.update(dict.fromkeys(_LOCAL_FIGURES[:2], NO_IMAGES))
            return
        weights = self._attention.mean("weights")[0]  # (heads, N, T)
        findings.measure("shift_weights", weights.mean(1)[None], "[layer][head][shift], share; mean over images and patches")
        findings.measure("shift_distance", self._attention.mean("shift_distance"), "[layer][head], pixels")
        findings.measure(
            "used_shifts", self._attention.mean("used_shifts"), "[layer][head], shifts: exp of the entropy of Eq. 3"
        )
        by_place = weights.transpose(1, 2).unflatten(-1, self._grid)  # (heads, T, rows, columns)
        findings.measure(
            "shift_weights_by_place",
            by_place.round(decimals=6),
            "[head][shift][row][column of the patch], share; mean over images",
        )
        findings.plots.append(
            Plot(
                "shift_weights",
                "Which shifted variants a patch attends to",
                "Weight of each variant in local attention (Eq. 3), mean over images and patches, one panel per head of the only local "
                "layer. A square stands where the variant's patch lies, in pixels from the unshifted one, which is framed; equal "
                f"weights would be {1 / len(shifts):.1%} each. White: not among the model's {len(shifts)} shifts.",
                "LSAT, Sec. 3.2 and Eq. 3 (the paper has no such figure)",
                partial(figures.shift_planes, weights.mean(1), shifts),
            )
        )
        findings.plots.append(
            Plot(
                "shift_weights_by_place",
                "Weights of the shifted variants over the image",
                "The same weights for every patch, mean over images: one map of all patches for each head and variant, which is named by "
                "where its patch lies (pixels down, right).",
                "LSAT, Eq. 3 (the paper has no such figure)",
                partial(figures.shift_maps, by_place, shifts),
            )
        )

    def _add_examples(self, findings: Findings, shifts: Tensor) -> None:
        if not self.request.examples:
            reason = "It shows examples: pass --examples." if self._attention.count else NO_IMAGES
            findings.omitted.update(dict.fromkeys(_LOCAL_FIGURES[2:], reason))
            return
        examples = list(self.request.examples)
        weights = [self._weights_of(each) for each in examples]  # (heads, N, T) each
        equal = -shifts.double().mean(0)  # (2,): not 0, for the sets have more shifts to one side
        offsets = [(each @ -shifts.double() - equal).unflatten(1, self._grid) for each in weights]  # (heads, rows, columns, 2)
        findings.measure("shift_examples.keys", [each.key for each in examples], "[example]")
        findings.measure(
            "shift_examples.offsets",
            [each.round(decimals=4).tolist() for each in offsets],
            "[example][head][row][column of the patch][down, right], pixels from where equal weights look",
        )
        first = weights[0].transpose(1, 2).unflatten(-1, self._grid)  # (heads, T, rows, columns)
        findings.measure(
            "shift_examples.weights",
            first.round(decimals=6),
            "[head][shift][row][column of the patch] of the first example, share",
        )
        findings.plots.append(
            Plot(
                "shift_offsets_on_images",
                "Where each patch looks, on images",
                "Mean place of a patch's variants by their weights, from the place that equal weights would give "
                f"({equal[0]:+.2f} pixels down, {equal[1]:+.2f} right of the patch), one column per head. Arrows point there, all at one "
                "scale, larger than they are; colours are their length in pixels.",
                "LSAT, Eq. 3 (the paper has no such figure)",
                partial(figures.offsets_on_images, examples, offsets),
            )
        )
        findings.plots.append(
            Plot(
                "shift_weights_on_image",
                "Weights of the shifted variants on an image",
                f"Weight of every variant (columns, named by where its patch lies: pixels down, right) at every patch of {examples[0].key}, "
                f"by head. At each patch the weights of a row sum to 1; equal weights would be {1 / len(shifts):.1%}.",
                "LSAT, Eq. 3 (the paper has no such figure)",
                partial(figures.weights_on_image, examples[0], first, shifts),
            )
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

    def _add_distances(self, findings: Findings) -> None:
        if self._attention.count == 0:
            findings.omitted["attention_distance"] = NO_IMAGES
            return
        first = 0 if self._shifts is None else 1
        layers = range(first, len(self._blocks))
        distances = [self._attention.mean(f"distance_{layer}")[0] for layer in layers]
        equal = []
        for layer in layers:
            pairs, queries = pair_distances(*self._blocks[layer])
            equal.append(pairs[queries].mean().item())
        levels, local = self._levels[first:], [None] * first
        findings.measure(
            "mean_attention_distance",
            [*local, *(each.tolist() for each in distances)],
            "[layer][head], patches of the level; null: the local layer",
        )
        findings.measure(
            "mean_attention_distance_uniform",
            [*local, *equal],
            "[layer], patches of the level: of equal weights over all keys; null: the local layer",
        )
        findings.measure("mean_attention_distance_levels", self._levels, "[layer], from 1")
        findings.plots.append(
            Plot(
                "attention_distance",
                "How far the heads of global attention look",
                "Mean distance between a query and what it attends to (ConViT, Eq. 8), in patches of the level, whose side doubles from one "
                "to the next. One bar per head; the dashed line is equal attention to all keys.",
                "the measure is that of ConViT, Fig. 5",
                partial(figures.distances, distances, equal, levels, first),
            )
        )
