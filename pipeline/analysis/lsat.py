"""Attention of LSAT (Sheynin et al., 2021): the weights of the shifted variants in local attention, distances in global attention.

Weights W_i (Eq. 3) say how much each of the T variants of patch i enters into the patch; they depend on the image. A variant's shift
(down, right) moves the image's content, so that its patch lies at (-down, -right) pixels from the unshifted one: figures show where
the patch lies. The paper draws neither; the measures are stated here.
"""

from collections.abc import Sequence
from functools import partial
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.analysis.chapter import Chapter, Example, Findings, Plot, Request, figure
from pipeline.analysis.maps import ATTENTION, map_figure, mark_query, overlay_grid
from pipeline.analysis.measures import Collector, distances_between, places, query_key_distances
from pipeline.analysis.style import Axes, Figure, layer_plot, new_figure, numbers
from pipeline.models.common.probe import observed
from pipeline.models.common.windows import Tiling
from pipeline.models.lsat.blocks import Shift, ShiftEmbedding
from pipeline.models.lsat.model import LSAT, AnyBlock, grid_side
from pipeline.models.lsat.table6 import KEY_VALUE_STRIDE, CvTBlock, SwinBlock

Grid = tuple[int, int]  # (rows, columns) of patches
_NO_SUCH = "Eq. 3 (the paper has no such figure)"


def pair_distances(block: AnyBlock, grid: Grid, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Distances of a block's queries from its keys in patches, in the layout of its probe ``attention``. The block is a global one, or
    one of Table 6; CvT's keys are every second patch along both axes. Returns distances (groups, L, S) float64; queries
    (groups, L) bool, False for the padding of Swin's windows."""
    if isinstance(block, SwinBlock):
        padded = Tiling(grid, block.window).padded
        tokens = places(*padded, device).unflatten(0, (1, *padded))
        windows = Tiling(padded, block.window, (block.shift, block.shift)).split(tokens)[0]  # (windows, N, 2)
        return distances_between(windows, windows), (windows < torch.tensor(grid, device=device)).all(-1)
    if isinstance(block, CvTBlock):
        rows, columns = (-(-size // KEY_VALUE_STRIDE) for size in grid)
        distances = distances_between(places(*grid, device)[None], KEY_VALUE_STRIDE * places(rows, columns, device)[None])
    else:
        distances = query_key_distances(*grid, device)[None]
    return distances, torch.ones(distances.shape[:2], dtype=torch.bool, device=device)


class LSATAttention(Collector):
    """Over images, weights of the variants by head and patch, their mean distance in pixels and how many of them a patch uses, and the
    mean attention distance (ConViT, Eq. 8) of every other layer and head.

    Sums: ``weights`` (1, heads, N, T), ``shift_distance`` and ``used_shifts`` (1, heads), ``distance_<layer>`` (1, heads).
    """

    def __init__(self, blocks: list[tuple[AnyBlock, Grid]], shifts: Tensor | None) -> None:
        super().__init__("attention")
        self.blocks, self.shifts = blocks, shifts

    def see(self, name: str, value: Tensor) -> None:
        if self.layer == 0 and self.shifts is not None:
            weights, lengths = value.squeeze(3), self.shifts.double().norm(dim=-1).to(value.device)  # (B, heads, N, T), (T,)
            self.add("weights", 0, weights)
            self.add("shift_distance", 0, (weights.double() * lengths).sum(-1).mean(-1))
            # exp of the entropy: from 1 (a single variant) to T (all alike)
            self.add("used_shifts", 0, torch.special.entr(weights.double()).sum(-1).exp().mean(-1))
            return
        distances, queries = pair_distances(*self.blocks[self.layer], value.device)  # 79 MB for LSAT-S's first level
        # One image at a time: in double precision, a batch of them would not fit for 3136 patches.
        of_queries = torch.stack([(of_image.double() * distances).sum(-1) for of_image in value])  # (B, heads, groups, L)
        self.add(f"distance_{self.layer}", 0, (of_queries * queries).sum((-2, -1)) / queries.sum())


class LSATChapter(Chapter):
    """Weights of the shifted variants per head and place, and mean attention distance of the other layers."""

    model: LSAT
    models = (LSAT,)

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
        self._attention = self.collect(LSATAttention(self._blocks, self._shifts if len(shifts) > 1 else None))
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

    @figure("shift_weights", "Which shifted variants a patch attends to", f"LSAT, Sec. 3.2 and {_NO_SUCH}", "images")
    def _shift_weights(self, findings: Findings) -> Plot:
        weights = self._attention.mean("weights")[0]  # (heads, N, T)
        findings.measure("shift_weights", weights.mean(1)[None], "[layer][head][shift], share; mean over images and patches")
        used = self._attention.mean("used_shifts")
        findings.measure("shift_distance", self._attention.mean("shift_distance"), "[layer][head], pixels")
        findings.measure("used_shifts", used, "[layer][head], shifts: exp of the entropy of Eq. 3")
        return Plot(
            "Weight of each variant in local attention (Eq. 3), mean over images and patches, one panel per head of the only local "
            "layer. A square stands where the variant's patch lies, in pixels from the unshifted one, which is framed; equal "
            f"weights would be {self._equal} each. White: not among the model's {len(self._shifts)} shifts.",
            partial(_shift_planes, weights.mean(1), self._shifts),
        )

    @figure("shift_weights_by_place", "Weights of the shifted variants over the image", f"LSAT, {_NO_SUCH}", "images")
    def _by_place(self, findings: Findings) -> Plot:
        maps = self._attention.mean("weights")[0].transpose(1, 2).unflatten(-1, self._grid)  # (heads, T, rows, columns)
        unit = "[head][shift][row][column of the patch], share; mean over images"
        names: dict[str, Any] = {"rows": numbers(len(maps)), "columns": list(map(place_name, self._shifts))}
        names["xlabel"] = "Place of the variant, pixels down, right"
        findings.measure("shift_weights_by_place", maps.round(decimals=6), unit)
        return Plot(
            "The same weights for every patch, mean over images: one map of all patches for each head and variant, which is named by "
            "where its patch lies (pixels down, right).",
            partial(map_figure, maps, "weight", **names, ylabel="Head", cell=max(0.6, 8 / len(self._shifts))),
        )

    @figure("shift_offsets_on_images", "Where each patch looks, on images", f"LSAT, {_NO_SUCH}", "examples")
    def _offsets(self, findings: Findings) -> Plot:
        examples, shifts = list(self.request.examples), self._shifts
        weights = [self._weights_of(example) for example in examples]  # (heads, N, T) each
        self._first = weights[0].transpose(1, 2).unflatten(-1, self._grid)  # (heads, T, rows, columns)
        equal = -shifts.double().mean(0)  # (2,): not 0, for the sets have more shifts to one side
        offsets = [(of_image @ -shifts.double() - equal).unflatten(1, self._grid) for of_image in weights]
        # (heads, rows, columns, 2) each
        patch = "[head][row][column of the patch][down, right], pixels from where equal weights look"
        unit = "[head][shift][row][column of the patch] of the first example, share"
        findings.measure("shift_examples.keys", [example.key for example in examples], "[example]")
        findings.measure("shift_examples.offsets", [of_image.round(decimals=4) for of_image in offsets], f"[example]{patch}")
        findings.measure("shift_examples.weights", self._first.round(decimals=6), unit)
        return Plot(
            "Mean place of a patch's variants by their weights, from the place that equal weights would give "
            f"({equal[0]:+.2f} pixels down, {equal[1]:+.2f} right of the patch), one column per head. Arrows point there, all at one "
            "scale, larger than they are; colours are their length in pixels.",
            partial(_offsets_on_images, examples, offsets),
        )

    @figure("shift_weights_on_image", "Weights of the shifted variants on an image", f"LSAT, {_NO_SUCH}", "examples")
    def _on_image(self, findings: Findings) -> Plot:
        example, limits = self.request.examples[0], (float(self._first.min()), float(self._first.max()))
        names, variants = [f"head {head}" for head in numbers(len(self._first[:6]))], list(map(place_name, self._shifts))
        drawing: dict[str, Any] = {"limits": limits, "label": "weight", "cell": 0.66}
        return Plot(
            f"Weight of every variant (columns, named by where its patch lies: pixels down, right) at every patch of {example.key}, "
            f"by head. At each patch the weights of a row sum to 1; equal weights would be {self._equal}.",
            partial(overlay_grid, [example.pixels] * len(names), self._first[:6], names, variants, **drawing),
        )

    @torch.no_grad()
    def _weights_of(self, example: Example) -> Tensor:
        """(heads, N, T) float64 on the CPU: the weights W_i of an image."""
        found: list[Tensor] = []

        def keep_first(_: str, value: Tensor) -> None:  # of all layers they would take hundreds of megabytes
            if not found:
                found.append(value[0, :, :, 0].double().cpu())

        with observed(keep_first, "attention"):
            self.model(example.image[None])
        return found[0]

    @figure("attention_distance", "How far heads of global attention look", "the measure is that of ConViT, Fig. 5", "images")
    def _distances(self, findings: Findings) -> Plot:
        first = int(len(self._shifts) > 1)  # the local layer has none
        found: list[Tensor | None] = [None] * first
        equal: list[float | None] = [None] * first
        for layer in range(first, len(self._blocks)):
            found.append(self._attention.mean(f"distance_{layer}")[0])
            pairs, queries = pair_distances(*self._blocks[layer])
            equal.append(pairs[queries].mean().item())
        unit = "[layer], patches of the level: of equal weights over all keys; null: the local layer"
        findings.measure("mean_attention_distance", found, "[layer][head], patches of the level; null: the local layer")
        findings.measure("mean_attention_distance_uniform", equal, unit)
        findings.measure("mean_attention_distance_levels", self._levels, "[layer], from 1")
        drawing: dict[str, Any] = {"dashed": ("equal attention", equal), "stages": self._levels, "word": "level"}
        return Plot(
            "Mean distance between a query and what it attends to (ConViT, Eq. 8), in patches of the level, whose side doubles from one "
            "to the next. One bar per head; the dashed line is equal attention to all keys.",
            partial(layer_plot, found, "mean distance, patches", **drawing),
        )


def place_name(shift: Any) -> str:
    """Where a variant's patch lies, pixels down and right of the unshifted one: "0, 0", "-1, +2"."""
    return ", ".join(_signed(-int(pixels)) for pixels in shift)


def _signed(value: int) -> str:
    return f"{value:+d}" if value else "0"


def _shift_planes(weights: Tensor, shifts: Tensor) -> Figure:
    """Per head, the variants on the plane of their offsets. Args: weights: (heads, T); shifts: (T, 2)."""
    offsets = -shifts.numpy()  # where the patch lies
    top, left = offsets.min(0)
    rows, columns = offsets.max(0) - offsets.min(0) + 1
    across = min(len(weights), 4)
    down = ceil(len(weights) / across)
    figure = new_figure(2.1 * across + 0.9, 2.3 * down * max(rows / columns, 0.6))
    grid = figure.subplots(down, across, squeeze=False)
    lowest, highest = float(weights.min()), float(weights.max())
    for axes in grid.flat[len(weights) :]:
        axes.set_axis_off()
    for head, (axes, of_head) in enumerate(zip(grid.flat, weights.numpy()), start=1):
        plane = np.full((rows, columns), np.nan)
        plane[offsets[:, 0] - top, offsets[:, 1] - left] = of_head
        axes.spines[:].set_visible(False)
        image = axes.imshow(plane, cmap=ATTENTION, vmin=lowest, vmax=highest)
        for (y, x), weight in zip(offsets, of_head):
            color = "black" if weight > lowest + 0.6 * (highest - lowest) else "white"
            axes.text(x - left, y - top, f"{100 * weight:.1f}", ha="center", va="center", fontsize=7, color=color)
        mark_query(axes, (-top, -left))
        axes.set_xticks(range(columns), map(_signed, range(left, left + columns)))
        axes.set_yticks(range(rows), map(_signed, range(top, top + rows)))
        axes.tick_params(length=0)
        axes.set_title(f"head {head}", fontsize=9)
    for axes in grid[:, 0]:
        axes.set_ylabel("pixels down")
    for axes in grid[-1]:
        axes.set_xlabel("pixels right")
    figure.colorbar(image, ax=grid.ravel().tolist(), label="weight, %", format=lambda value, _: f"{100 * value:g}", aspect=25)
    return figure


def _offsets_on_images(examples: Sequence[Example], offsets: Sequence[Tensor]) -> Figure:
    """Each image, and on it the mean offset of every patch by head. Args: offsets: per example (heads, rows, columns, 2), pixels."""
    lengths = [of_image[:8].norm(dim=-1) for of_image in offsets]  # (heads, rows, columns) each
    longest, heads = max(float(of_image.norm(dim=-1).max()) for of_image in offsets) or 1.0, len(lengths[0])
    pixels = [example.pixels for example in examples]
    layout: dict[str, Any] = {"label": "mean offset, pixels", "cell": max(1.1, 7.5 / (heads + 1))}
    names = [f"head {head}" for head in numbers(heads)]
    figure = overlay_grid(pixels, lengths, [example.label for example in examples], names, limits=(0.0, longest), **layout)
    for place, of_image in enumerate(offsets):
        for axes, of_head in zip(figure.axes[place * (heads + 1) + 1 :], of_image[:heads]):
            _arrows(axes, of_head, pixels[0].shape[-1], longest)
    return figure


def _arrows(axes: Axes, offsets: Tensor, size: int, longest: float) -> None:
    """Arrows of (rows, columns, 2) on an image of ``size`` pixels, at most 12 along a side: means over blocks of patches."""
    rows = len(offsets)
    block = ceil(rows / 12)
    down, right = torch.nn.functional.avg_pool2d(offsets.movedim(-1, 0)[None], block, ceil_mode=True)[0].numpy()
    starts = np.arange(0, rows, block)
    centers = (starts + np.minimum(starts + block, rows)) / 2 * size / rows - 0.5
    x, y = np.meshgrid(centers, centers)
    scale = longest / (0.9 * block * size / rows)  # the longest arrow is as long as its block
    look = {"color": "white", "angles": "xy", "scale_units": "xy", "pivot": "mid", "width": 0.011}
    axes.quiver(x, y, right, down, **look, scale=scale)
