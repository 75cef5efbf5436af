"""Self-attention of any family with a square grid of tokens (DeiT, DeiT III, ConViT, PerViT): how far heads look (ConViT, Eq. 8, Fig. 5).

What other chapters on attention share is here too: measures of each image, maps of a query, and bars per layer and head.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pipeline.analysis.chapter import Chapter, Drawn, Example, Findings, Request, figure
from pipeline.analysis.measures import Collector, mean_attention_distance, query_key_distances
from pipeline.analysis.style import new_figure
from pipeline.models.common.base import VisionModel
from pipeline.models.common.probe import recorded
from pipeline.models.common.vit import patch_grid
from pipeline.models.convit import ConViT
from pipeline.models.deit import DeiT
from pipeline.models.deit3 import DeiT3
from pipeline.models.pervit.model import PerViT
from pipeline.page import BLUE, COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class ImageMeasures(Collector):
    """Sums over images of measures per layer and head, (layers, heads) each by its name.

    Args:
        grid: (rows, columns) of patches.
        probes: see the base class. A layer offers ``phi_p`` before the last: (heads, N, N), or for each image (B, heads, M, M).

    Attributes:
        distances: (N, N), see :func:`~pipeline.analysis.measures.query_key_distances`.
    """

    def __init__(self, grid: tuple[int, int], *probes: str) -> None:
        super().__init__(*probes)
        self.distances = query_key_distances(*grid)
        self._phi_p: Tensor | None = None

    def see(self, name: str, value: Tensor) -> None:
        if name != self.probes[-1]:
            self._phi_p = value
            return
        self.distances = self.distances.to(value.device)
        phi_p = self._phi_p
        shared = phi_p.double() if phi_p is not None and phi_p.dim() < value.dim() else None
        # float64 of one image at a time; value is (B, heads, M, M), or (1, heads, M, M) where it depends on no image
        images = [
            self.measures(value[i].double(), shared if phi_p is None or shared is not None else phi_p[i].double())
            for i in range(len(value))
        ]
        for measure in images[0]:
            per_image = torch.stack([of_image[measure] for of_image in images])  # (B, heads)
            self.add(measure, self.layer, per_image.expand(len(self.valid), -1))
        self._phi_p = None

    def patches(self, attention: Tensor) -> Tensor:
        """(heads, M, M) -> (heads, N, N): without a class token, which has no place."""
        tokens = len(self.distances)
        return attention[..., -tokens:, -tokens:]

    def measures(self, value: Tensor, phi_p: Tensor | None) -> dict[str, Tensor]:
        """Of one image: (heads, M, M) float64 -> name -> (heads,)."""
        raise NotImplementedError


class AttentionDistance(ImageMeasures):
    """Mean attention distance, ``distance``. A class token, as query and as key, is left out; the rows of the rest are normalized
    again."""

    def __init__(self, grid: tuple[int, int]) -> None:
        super().__init__(grid, "attention")

    def measures(self, value: Tensor, phi_p: Tensor | None) -> dict[str, Tensor]:
        patches = self.patches(value)
        return {"distance": mean_attention_distance(patches / patches.sum(-1, keepdim=True), self.distances)}


class QueryMaps(Collector):
    """Attention of one query to all patches, mean over images: ``mean("maps")`` is (layers, heads, N).

    Args:
        query: number of the patch, row by row.
        tokens: N, patches of an image.
    """

    def __init__(self, query: int, tokens: int) -> None:
        super().__init__("attention")
        self.query, self.tokens = query, tokens

    def see(self, name: str, value: Tensor) -> None:
        self.add("maps", self.layer, patch_row(value, self.query, self.tokens).expand(len(self.valid), -1, -1))


def patch_row(attention: Tensor, query: int, tokens: int) -> Tensor:
    """Attention of a patch to all patches: (..., M, M), M >= N -> (..., N); what comes before the patches is left out."""
    return attention[..., -tokens:, -tokens:][..., query, :]


class GridChapter(Chapter):
    """Base of the chapters on attention over one grid of patches.

    Attributes:
        grid: (rows, columns) of patches; tokens: N of them.
        query: (row, column) of the patch whose maps are shown; query_index: its number, row by row.
    """

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.grid = patch_grid(request.image_size, request.image_size)
        self.tokens = self.grid[0] * self.grid[1]
        self.query = request.query_on(self.grid)
        self.query_index = self.query[0] * self.grid[1] + self.query[1]

    def query_row(self, attention: Tensor) -> Tensor:
        """The query's attention to the patches, (..., M, M) -> (..., rows, columns)."""
        return patch_row(attention, self.query_index, self.tokens).unflatten(-1, self.grid)

    @torch.no_grad()
    def attention_on(self, example: Example) -> list[Tensor]:
        """Attention of each layer, (heads, M, M), on the CPU."""
        with recorded("attention") as values:
            self.model(example.image[None])
        return [value[0].cpu() for value in values["attention"]]


class AttentionChapter(GridChapter):
    """Mean attention distance per layer and head."""

    @classmethod
    def applies(cls, model: VisionModel) -> bool:
        return isinstance(model, DeiT | DeiT3 | ConViT | PerViT)

    def make_collectors(self) -> list[Collector]:
        self._distance = AttentionDistance(self.grid)
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
