"""Self-attention of any family with a square grid of tokens (DeiT, DeiT III, ConViT, PerViT): how far heads look (ConViT, Eq. 8, Fig. 5).

The bars per layer and head are those of other chapters too.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pipeline.analysis.averages import Collector
from pipeline.analysis.chapter import Chapter, Drawn, Findings, figure
from pipeline.analysis.measures import mean_attention_distance, query_key_distances
from pipeline.analysis.style import new_figure
from pipeline.models.common.base import VisionModel
from pipeline.models.common.vit import patch_grid
from pipeline.models.convit import ConViT
from pipeline.models.deit import DeiT
from pipeline.models.deit3 import DeiT3
from pipeline.models.pervit.model import PerViT
from pipeline.page import BLUE, COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class AttentionDistance(Collector):
    """Mean attention distance of every layer and head, over images. A class token, as query and as key, is left out: it has no
    place; the rows of the rest are normalized again."""

    def __init__(self, grid: tuple[int, int]) -> None:
        super().__init__("attention")
        self.distances = query_key_distances(*grid)

    def see(self, name: str, value: Tensor) -> None:
        tokens = len(self.distances)
        self.distances = self.distances.to(value.device)
        patches = value[..., -tokens:, -tokens:]  # (B, heads, N, N) or (1, heads, N, N)
        per_image = torch.stack([self.distance(image) for image in patches])  # (B, heads): float64 of one image at a time
        self.add("distance", self.layer, per_image.expand(len(self.valid), -1))

    def distance(self, patches: Tensor) -> Tensor:
        """(heads, N, N) -> (heads,) float64."""
        patches = patches.double()
        return mean_attention_distance(patches / patches.sum(-1, keepdim=True), self.distances)


class AttentionChapter(Chapter):
    """Mean attention distance per layer and head."""

    @classmethod
    def applies(cls, model: VisionModel) -> bool:
        return isinstance(model, DeiT | DeiT3 | ConViT | PerViT)

    def make_collectors(self) -> list[Collector]:
        self._distance = AttentionDistance(patch_grid(self.request.image_size, self.request.image_size))
        return [self._distance]

    @figure(
        "attention_distance", "Mean attention distance", "ConViT, Eq. 8 and Fig. 5, at one time of the training", needs="images"
    )
    def _distances(self, findings: Findings) -> Drawn:
        distance, even = self._distance.mean("distance"), float(self._distance.distances.mean())
        findings.measure("mean_attention_distance", distance, "[layer][head], patches")
        return Drawn(
            "How far from the query a head looks: the mean distance of the patches that it attends to, weighted by the attention, in "
            f"patches, over all queries and {self.count:,} images. One bar per head. Attention spread evenly over "
            f"the grid gives {even:.2f} (dashed).",
            partial(_draw, distance, even),
        )


def _draw(distance: Tensor, even: float) -> Figure:
    figure = layer_head_plot(distance, "Distance in patches")
    figure.axes[0].axhline(even, color="black", linestyle="--", linewidth=0.8)
    return figure


def layer_head_plot(
    values: Any,
    ylabel: str,
    title: str = "",
    *,
    ylim: tuple[float | None, float | None] = (None, None),
    color: str = BLUE,
    axes: Axes | None = None,
) -> Figure:
    """One bar per head, grouped by layer, with a line through the layers' means, as PerViT's Fig. 7 and 8.

    Args:
        values: (layers, heads), or a list of layers with different numbers of heads; what is not finite has no bar.
        ylabel: quantity and unit.
        axes: to draw into (default: a figure of its own).
    """
    if axes is None:
        axes = new_figure(max(5.0, 0.55 * len(values) + 1.0), 2.8).add_subplot()
    means = []
    for layer, of_layer in enumerate(values, start=1):
        heads = np.asarray(of_layer, dtype=np.float64)
        finite = np.isfinite(heads)
        width = 0.8 / len(heads)
        places = layer - 0.4 + width * (np.arange(len(heads)) + 0.5)
        axes.bar(places[finite], heads[finite], width * 0.9, color=_lighter(color), linewidth=0)
        means.append(heads[finite].mean() if finite.any() else np.nan)
    axes.plot(range(1, len(means) + 1), means, color="black", marker="o", markersize=3, label="mean of the heads")
    axes.set_xticks(range(1, len(means) + 1))
    axes.set_xlim(0.4, len(means) + 0.6)
    axes.set_ylim(*ylim)
    axes.grid(axis="y")
    axes.set(xlabel="Layer", ylabel=ylabel, title=title)
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.1)
    figure = axes.get_figure(root=True)
    assert figure is not None
    return figure


def layer_head_plots(panels: Mapping[str, Any], ylabel: str) -> Figure:
    """Several of :func:`layer_head_plot` under each other, one colour each. Args: panels: title -> values."""
    layers = max(len(values) for values in panels.values())
    figure = new_figure(max(5.0, 0.55 * layers + 1.0), 2.3 * len(panels) + 0.2)
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False)
    for axes, (title, values), color in zip(grid[:, 0], panels.items(), COLOURS * 9, strict=False):
        layer_head_plot(values, ylabel, title, color=color, axes=axes)
        if axes is not grid[-1, 0]:
            axes.set_xlabel("")
    return figure


def _lighter(color: str) -> tuple[float, ...]:
    """Half way to white; not transparent, so that no grid shows through."""
    from matplotlib.colors import to_rgb

    return tuple((1 + channel) / 2 for channel in to_rgb(color))
