"""PerViT: the learned Φp of one query, all layers and heads (Min et al., NeurIPS 2022, Fig. 4, S6, S7, S9 to S11), Φp at
initialization (Fig. 2, S1), and Φp, Φc and Φa over images (Fig. 6 and S12 to S14)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pipeline.analysis.chapter import Declared, Drawn, Example, Findings, figure
from pipeline.analysis.chapters.pervit_position import (
    NO_PHI_C,
    NO_PHI_P,
    OWN_SCALE,
    PHI,
    PeripheralChapter,
    draw_maps,
    map_figure,
    reordered,
    stretched,
)
from pipeline.analysis.measures import finite, rounded
from pipeline.analysis.style import new_figure, numbers, show_image
from pipeline.models.common.base import VisionModel
from pipeline.models.common.probe import observed
from pipeline.models.pervit.phi_model import PhiModel
from pipeline.models.pervit.position import (
    NORM_BIAS,
    NORM_WEIGHT,
    DistanceScales,
    LearnedVectors,
    PeripheralPosition,
    PhiDesign,
    position_distances,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_REDRAWN = "The start was random and is not kept: it is drawn anew here, its heads in the model's order. "


class MapsChapter(PeripheralChapter):
    """``phi_p_maps`` and ``initialization``: needs no images."""

    def lacks(self, name: str) -> str | None:
        if not self.has_phi_p:
            return NO_PHI_P
        if name == "initialization_norm" and self.model.phi_design != PhiDesign():
            return "The paper shows it for its own Φp (Euc + N + ML) with peripheral initialization, which this model does not have."
        return None

    @classmethod
    def figures_of(cls, model: VisionModel) -> list[Declared]:
        """Without Φp, the norm of its initialization has no reason of its own."""
        assert isinstance(model, PhiModel)
        return cls.declared if model.phi_design is not None else cls.declared[:2]

    @figure("phi_p", "Learned position-based attention", "PerViT, Fig. 4 and S9 to S11")
    def _learned(self, findings: Findings) -> Drawn:
        maps, order = self.query_maps(), self.order()
        findings.measure("query", list(self.query), "row and column of the token whose maps are shown, from 0")
        findings.measure("head_order", order, "[layer][place], heads from 0 as the figures sort them, the most local first")
        findings.measure("phi_p_maps", rounded(maps), "[layer][head][row][column], Φp of the query, 0 to 1")
        return Drawn(
            f"Position-based attention Φp of one query (framed: {self.query_text}). Columns are layers; in each the heads are sorted by "
            "their nonlocality Ωp, which is written above a map in patches. Every map has its own colours, from its least to its largest "
            "value.",
            partial(_own_scale, reordered(maps, order), reordered(self.phi_p_nonlocality(), order), self.query),
        )

    @figure("initialization", "Φp at initialization and now", "PerViT, Fig. 2 and S1")
    def _initialization(self, findings: Findings) -> Drawn:
        trained = reordered(self.query_maps(), self.order())
        start = initial_maps(self.model, self.grid, self.query)  # (layers, heads, rows, columns)
        alike = bool((start == start[:, :1]).all())
        start = start[:, :1] if alike else start
        unit = "[layer][head][row][column]; one head where all are alike"
        findings.measure("initialization.phi_p_maps", rounded(start), unit)
        distance = (trained - start).abs().mean(dim=(1, 2, 3))
        unit = "[layer], mean |Φp - initial Φp| of the query's maps, heads of Φp sorted"
        findings.measure("initialization.mean_change", finite(distance), unit)
        return Drawn(
            f"Φp of the query (framed: {self.query_text}) as training began{', the same for all heads,' if alike else ''} and as it is "
            f"now, heads sorted by nonlocality. {'' if alike else _REDRAWN}All maps share one scale, so that brightness compares.",
            partial(_beside_initialization, start, trained, self.query),
        )

    @figure("initialization_norm", "Bias and weight of the initial Φp", "PerViT, Fig. S1")
    def _norm(self, findings: Findings) -> Drawn:
        maps, rows = _last_norm_maps(self.model, self.grid, self.query), {0: "bias", 1: "weight", 2: "both"}
        return Drawn(
            "Size and strength of the initial Φp, for the framed query. First row: the bias of the last instance norm grows from "
            f"{NORM_BIAS[0]:g} to {NORM_BIAS[1]:g}, its weight is 1. Second row: the weight falls from {NORM_WEIGHT[0]:g} to "
            f"{NORM_WEIGHT[1]:g}, the bias is 0. Third row: both, the peripheral initialization of the layers. The paper does not say "
            "what the other of the two is in the first two rows; these are instance norm's own.",
            partial(map_figure, maps, self.query, PHI["phi_p"], rows=rows),
        )


@torch.no_grad()
def initial_maps(model: PhiModel, grid: tuple[int, int], query: tuple[int, int], seed: int = 0) -> Tensor:
    """Φp of a query before training: of new networks with the model's design.

    What the design draws at random is drawn anew from ``seed``: an initialization of the same kind, not the one that the model had.

    Returns:
        (layers, heads, rows, columns) on the CPU.
    """
    design, depth = model.phi_design, len(model.blocks)
    assert design is not None, NO_PHI_P
    heads = model.blocks[0].attn.heads
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        distance = _distances(grid, design, 4 * heads)
        scale, offset = DistanceScales(4 * heads, design.init)()
        layers = [PeripheralPosition(heads, layer, depth, design) for layer in range(depth)]
    return torch.stack([_query_map(layer(distance, scale, offset), grid, query) for layer in layers])


@torch.no_grad()
def _last_norm_maps(model: PhiModel, grid: tuple[int, int], query: tuple[int, int]) -> Tensor:
    """(3, layers, rows, columns): the initial Φp with the bias of Fig. S1, with its weight, with both."""
    depth = len(model.blocks)
    position = PeripheralPosition(1, 0, 1)
    distance = _distances(grid, PhiDesign(), 4)
    scale, offset = DistanceScales(4)()
    biases, weights = torch.linspace(*NORM_BIAS, depth).tolist(), torch.linspace(*NORM_WEIGHT, depth).tolist()
    rows = []
    for pairs in ([(bias, 1.0) for bias in biases], [(0.0, weight) for weight in weights], list(zip(biases, weights))):
        maps = []
        for bias, weight in pairs:
            nn.init.constant_(position.norm2.bias, bias)
            nn.init.constant_(position.norm2.weight, weight)
            maps.append(_query_map(position(distance, scale, offset), grid, query)[0])
        rows.append(torch.stack(maps))
    return torch.stack(rows)


def _distances(grid: tuple[int, int], design: PhiDesign, channels: int) -> Tensor:
    if design.distance == "learned":
        return LearnedVectors(channels, grid, design.border)(grid)
    return position_distances(*grid, torch.device("cpu"), torch.get_default_dtype(), design.border)


def _query_map(log_phi: Tensor, grid: tuple[int, int], query: tuple[int, int]) -> Tensor:
    """log Φp (heads, N, N) -> Φp of the query, (heads, rows, columns)."""
    return log_phi[:, query[0] * grid[1] + query[1]].exp().unflatten(1, grid)


def _own_scale(maps: Tensor, omega: Tensor, query: tuple[int, int]) -> Figure:
    """Maps (layers, heads, rows, columns), each in its own colours below its omega (layers, heads)."""
    notes = [[f"{each:.2f}" for each in head] for head in omega.T.tolist()]
    return map_figure(stretched(maps).transpose(0, 1), query, OWN_SCALE, notes=notes)


def _beside_initialization(start: Tensor, trained: Tensor, query: tuple[int, int]) -> Figure:
    maps = torch.cat([start, trained], dim=1).transpose(0, 1)  # (heads, layers, rows, columns)
    first = start.shape[1]
    return map_figure(maps, query, PHI["phi_p"], rows={0: "initial", first: "now"}, apart={first})


_LAYERS = (3, 4, 8)  # of Fig. 6, from 1
_HEADS = 4  # shown side by side; PerViT-T has no more


@dataclass(frozen=True)
class _Maps:
    """Of one image and query, heads sorted: (layers, heads, rows, columns) each, on the CPU; phi_p None where Φp = 1."""

    phi_p: Tensor | None
    phi_c: Tensor

    def parts(self) -> dict[str, Tensor]:
        """Label -> maps. Without Φp, Φa is Φc."""
        if self.phi_p is None:
            return {PHI["phi_c"]: self.phi_c}
        return {PHI["phi_p"]: self.phi_p, PHI["phi_c"]: self.phi_c, PHI["attention"]: self.phi_p * self.phi_c}


class ImagesChapter(PeripheralChapter):
    """``examples`` and a figure of all layers for each of them, and one of the paper's layers for all."""

    def lacks(self, name: str) -> str | None:
        if not self.has_phi_c:
            return NO_PHI_C
        return None if self.request.examples else "It shows examples: pass --data and --examples."

    @figure("attention_images", "Attention over images", "PerViT, Fig. 6", needs="examples")
    def _images(self, findings: Findings) -> Drawn:
        self._shown = [self._maps(example) for example in self.request.examples]
        kept = [
            {"key": example.key, "phi_c": rounded(maps.phi_c, 4)} for example, maps in zip(self.request.examples, self._shown)
        ]
        unit = "phi_c: [layer][place][row][column], Φc of the query; heads in head_order, if there is one"
        findings.measure("example_maps", kept, unit)
        fewer = f", {_HEADS} of them from the most local to the most global" if self._shown[0].phi_c.shape[1] > _HEADS else ""
        return Drawn(
            f"Attention of one query (framed: {self.query_text}) at three depths: the position-based Φp, which is the same for all images, "
            f"above; then, for each image, the content-based Φc and their product Φa. A column is a head, {self._heads()}{fewer}. Every map "
            "has its own colours, from its least to its largest value.",
            partial(_few_layers, self.request.examples, self._shown, self.query),
        )

    @figure("attention_image", "Attention on an image", "PerViT, Fig. S12 to S14", needs="examples")
    def _image(self, findings: Findings) -> list[Drawn]:
        return [
            Drawn(
                f"All layers for {example.key} ({example.label}); the query is framed. Columns are layers; rows are {self._heads()}. Every "
                "map has its own colours, from its least to its largest value.",
                partial(_all_layers, example, maps, self.query),
                title=f"Attention on image {number}",
            )
            for number, (example, maps) in enumerate(zip(self.request.examples, self._shown), start=1)
        ]

    def _heads(self) -> str:
        return "the heads sorted by Ωp" if self.has_phi_p else "the heads in the model's order"

    @torch.no_grad()
    def _maps(self, example: Example) -> _Maps:
        contents: list[Tensor] = []

        def keep(name: str, value: Tensor) -> None:  # (1, heads, M, M), of which only the query's row is kept
            contents.append(self.query_row(value[0]).float().cpu())

        with observed(keep, "phi_c"):
            self.model(example.image[None])
        phi_c = torch.stack(contents)  # (layers, heads, rows, columns)
        if not self.has_phi_p:
            return _Maps(None, phi_c)
        order = self.order()
        return _Maps(reordered(self.query_maps(), order), reordered(phi_c, order))


def _few_layers(examples: Sequence[Example], maps: Sequence[_Maps], query: tuple[int, int]) -> Figure:
    """Fig. 6: a row of Φp, then two rows an image; a column for each of the layers and heads."""
    depth, heads, patches, _ = maps[0].phi_c.shape
    layers = [layer for layer in _LAYERS if layer <= depth]
    shown = torch.linspace(0, heads - 1, min(heads, _HEADS)).round().int().tolist()
    static = [(name, each) for name, each in maps[0].parts().items() if name == PHI["phi_p"]]
    blocks: list[tuple[Example | None, list[tuple[str, Tensor]]]] = [(None, static)] if static else []
    blocks += [(example, list(each.parts().items())[len(static) :]) for example, each in zip(examples, maps)]
    heights = [len(rows) for _, rows in blocks]
    figure = new_figure(0.58 * len(shown) * len(layers) + 2.4, 0.64 * sum(heights) + 0.1 * len(blocks) + 0.4)
    grid = figure.add_gridspec(
        len(blocks), 1 + len(layers), height_ratios=heights, width_ratios=(2, *[len(shown)] * len(layers))
    )
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.set(wspace=0.1)  # type: ignore[call-arg]  # layers stand further apart than heads
    for number, (example, rows) in enumerate(blocks):
        if example is not None:
            show_image(figure.add_subplot(grid[number, 0]), example.pixels, query, patches)
        for column, layer in enumerate(layers):
            axes = figure.add_subplot(grid[number, 1 + column])
            labels = {row: name for row, (name, _) in enumerate(rows)} if column == 0 else None
            title = "" if number else f"Layer {layer}"
            draw_maps(
                axes, torch.stack([stretched(each[layer - 1][shown]) for _, each in rows]), query, rows=labels, title=title
            )
    return figure


def _all_layers(example: Example, maps: _Maps, query: tuple[int, int]) -> Figure:
    """A block for each of Φp, Φc and Φa, one under the other, heads by layers, with the image beside."""
    parts = maps.parts()
    layers, heads, patches, _ = maps.phi_c.shape
    starts = {index * heads: name for index, name in enumerate(parts)}
    rows = torch.cat([stretched(each) for each in parts.values()], dim=1).transpose(0, 1)
    cell = 0.5  # inches
    figure = new_figure(1.06 * layers * cell + 1.9, 1.06 * len(rows) * cell + 0.2 * len(parts) + 0.5)
    left, right = figure.subplots(1, 2, width_ratios=(1.2, 1.06 * layers * cell))
    show_image(left, example.pixels, query, patches)
    left.set_anchor("N")
    draw_maps(right, rows, query, rows=starts, columns=numbers(layers), title="Layer", apart=list(starts)[1:])
    right.set_anchor("N")
    return figure
