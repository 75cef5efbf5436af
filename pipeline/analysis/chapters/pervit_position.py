"""Share helpers among the chapters on peripheral attention: the models they take, Φp of each layer, the query, the order of heads, and grids of
maps."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipeline.analysis.chapter import Request
from pipeline.analysis.chapters.attention import GridChapter
from pipeline.analysis.measures import nonlocality, query_key_distances
from pipeline.analysis.style import MAP_COLORS, draw_mosaic, gap_of, new_figure, numbers
from pipeline.models.common.base import VisionModel
from pipeline.models.pervit.model import PerViT
from pipeline.models.pervit.phi_model import PhiModel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PHI = {"phi_p": "$\\Phi_p$", "phi_c": "$\\Phi_c$", "attention": "$\\Phi_a$"}
OWN_SCALE = "each map from its least to its largest value"
NO_PHI_P = "The model has no position-based attention (model.switches.phi_p=false)."
NO_PHI_C = (
    "The model has no content-based attention (model.switches.phi_c=false): its attention is Φp, the same for all images."
)


class PeripheralChapter(GridChapter):
    """Base of the chapters on PerViT and its ablations, and on DeiT with Φp.

    Attributes:
        has_phi_p, has_phi_c: whether the model has this attention; one that it lacks is 1 everywhere.
    """

    model: PhiModel

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.has_phi_p = self.model.phi_design is not None
        self.has_phi_c = getattr(self.model.switches, "phi_c", True)

    @classmethod
    def applies(cls, model: VisionModel) -> bool:
        return isinstance(model, PerViT) or (isinstance(model, PhiModel) and model.phi_design is not None)

    @property
    def query_text(self) -> str:
        """For captions, counted from 0."""
        return f"row {self.query[0]}, column {self.query[1]} of the {self.grid[0]} x {self.grid[1]} tokens"

    @torch.no_grad()
    def phi_p(self) -> Iterator[Tensor]:
        """Φp of one layer after the other, (heads, N, N)."""
        for log_phi in self.model.log_phi(self.grid):
            assert log_phi is not None, NO_PHI_P
            yield log_phi.exp()

    def phi_p_nonlocality(self) -> Tensor:
        """Ωp, (layers, heads) float64 on the CPU, in patches (PerViT, Eq. 13)."""
        distances = query_key_distances(*self.grid, next(self.model.parameters()).device)
        return torch.stack([nonlocality(phi, distances) for phi in self.phi_p()]).cpu()

    def order(self) -> Tensor:
        """(layers, heads): the heads of each layer, the most local first, as the authors draw them (PerViT, Fig. 4)."""
        return self.phi_p_nonlocality().argsort(dim=1, stable=True)

    def query_maps(self) -> Tensor:
        """Φp of the query: (layers, heads, rows, columns), on the CPU, in the model's order of heads."""
        return torch.stack([self.query_row(phi) for phi in self.phi_p()]).cpu()


def reordered(values: Tensor, order: Tensor) -> Tensor:
    """(layers, heads, ...) with the heads of each layer in the given order (layers, heads)."""
    return torch.stack([layer[heads] for layer, heads in zip(values, order)])


def stretched(maps: Tensor) -> Tensor:
    """(..., rows, columns) with each map stretched to [0, 1]; a map of one value, which has nothing to stretch, keeps it."""
    low, high = maps.amin((-2, -1), keepdim=True), maps.amax((-2, -1), keepdim=True)
    flat = high - low <= 1e-6 * high
    return torch.where(flat, maps, (maps - low) / torch.where(flat, 1.0, high - low))


def draw_maps(
    axes: Axes,
    maps: Tensor,
    query: tuple[int, int],
    *,
    rows: Mapping[int, str] | None = None,
    columns: Sequence[str] = (),
    title: str = "",
    notes: Sequence[Sequence[str]] | None = None,
    apart: Collection[int] = (),
) -> None:
    """Maps with colours from 0 to 1, in rows and columns of one axes, each with the query framed.

    Args:
        maps: (rows, columns, h, w).
        rows: number of a row -> its label.
        columns: labels, above; none: no labels.
        title: above them.
        notes: text above each map.
        apart: rows with more space before them.
    """
    zoom = max(1, round(14 / maps.shape[-1]))  # pixels a token: the gaps of small grids are no wider than those of large ones
    maps = maps.repeat_interleave(zoom, -2).repeat_interleave(zoom, -1)
    count, across, height, width = maps.shape
    gap = gap_of(width)
    above = gap + max(1, round(0.2 * height)) if notes else gap
    tops, top = [], 0
    for row in range(count):
        top += (above if row or notes else 0) + (max(2, height // 3) if row in apart else 0)
        tops.append(top)
        top += height
    lefts = [column * (width + gap) for column in range(across)]
    colours: dict[str, Any] = {"cmap": MAP_COLORS, "vmin": 0, "vmax": 1}
    draw_mosaic(axes, maps, tops, lefts, query=query, side=zoom, rows=rows, columns=columns, **colours)
    for top, texts in zip(tops, notes or ()):
        for left, text in zip(lefts, texts):
            axes.text(left + (width - 1) / 2, top - 0.8, text, ha="center", va="bottom", fontsize=6)
    axes.set_title(title)


def map_figure(
    maps: Tensor,
    query: tuple[int, int],
    label: str,
    *,
    title: str = "Layer",
    rows: Mapping[int, str] | None = None,
    notes: Sequence[Sequence[str]] | None = None,
    apart: Collection[int] = (),
) -> Figure:
    """A figure of :func:`draw_maps` with numbered columns and a colour bar. Args: label: of the bar."""
    count, across = maps.shape[:2]
    cell = min(0.8, 7.2 / across)
    figure = new_figure(
        across * cell + (2.0 if rows else 1.2), count * cell * (1.25 if notes else 1.07) + 0.2 * len(apart) + 0.6
    )
    axes = figure.add_subplot()
    draw_maps(axes, maps, query, rows=rows, columns=numbers(across), title=title, notes=notes, apart=apart)
    bar = figure.colorbar(axes.images[0], ax=axes, label=label, fraction=0.03, pad=0.02, aspect=20)
    if label == OWN_SCALE:
        bar.set_ticks([0, 1], labels=["least", "largest"])
    return figure
