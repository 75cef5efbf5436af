"""PerViT: the learned Φp of one query, all layers and heads (Min et al., NeurIPS 2022, Fig. 4, S6, S7, S9 to S11), Φp at
initialization (Fig. 2, S1), and Φp, Φc and Φa over images (Fig. 6 and S12 to S14)."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.analysis.chapter import Example, Findings, Plot, figure
from pipeline.analysis.maps import ATTENTION, draw_maps, map_figure, show_image, stretched
from pipeline.analysis.pervit import NO_PHI_C, NO_PHI_P, PHI, PeripheralChapter
from pipeline.analysis.style import Figure, new_figure, numbers
from pipeline.models.pervit import position
from pipeline.models.pervit.phi_model import PhiModel
from pipeline.models.pervit.position import NORM_BIAS, NORM_WEIGHT, DistanceScales, PeripheralPosition, PhiDesign

_REDRAWN = "The start was random and is not kept: it is drawn anew here, its heads in the model's order. "


class MapsChapter(PeripheralChapter):
    """``phi_p_maps`` and ``initialization``: needs no images."""

    def lacks(self, name: str) -> str | None:
        if not self.has_phi_p:  # the norm of its initialization has no reason of its own
            return "" if name == "initialization_norm" else NO_PHI_P
        if name == "initialization_norm" and self.model.phi_design != PhiDesign():
            return "The paper shows it for its own Φp (Euc + N + ML) with peripheral initialization, which this model does not have."
        return None

    @figure("phi_p", "Learned position-based attention", "PerViT, Fig. 4 and S9 to S11")
    def _learned(self, findings: Findings) -> Plot:
        maps, order = self.query_maps(), self.order
        shown = reordered(maps, order).transpose(0, 1)  # (heads, layers, rows, columns)
        notes = [[f"{omega:.2f}" for omega in head] for head in reordered(self.omega_p, order).T.tolist()]
        findings.measure("query", self.query, "row and column of the token whose maps are shown, from 0")
        findings.measure("head_order", order, "[layer][place], heads from 0 as the figures sort them, the most local first")
        findings.measure("phi_p_maps", maps, "[layer][head][row][column], Φp of the query, 0 to 1", 5)
        return Plot(
            f"Position-based attention Φp of one query (framed: {self.query_text}). Columns are layers; in each the heads are sorted by "
            "their nonlocality Ωp, which is written above a map. Every map has its own colours, from its least to its largest "
            "value.",
            partial(self._map_figure, shown, own_scales=True, notes=notes),
        )

    @figure("initialization", "Φp at initialization and now", "PerViT, Fig. 2 and S1")
    def _initialization(self, findings: Findings) -> Plot:
        trained = reordered(self.query_maps(), self.order)
        start = initial_maps(self.model, self.grid, self.query)  # (layers, heads, rows, columns)
        alike = bool((start == start[:, :1]).all())
        start = start[:, :1] if alike else start
        findings.measure("initialization.phi_p_maps", start, "[layer][head][row][column]; one head where all are alike", 5)
        maps, first = torch.cat([start, trained], dim=1).transpose(0, 1), start.shape[1]  # (heads, layers, rows, columns)
        distance = (trained - start).abs().mean(dim=(1, 2, 3))
        unit = "[layer], mean |Φp - initial Φp| of the query's maps, heads of Φp sorted"
        findings.measure("initialization.mean_change", distance, unit)
        return Plot(
            f"Φp of the query (framed: {self.query_text}) as training began{', the same for all heads,' if alike else ''} and as it is "
            f"now, heads sorted by nonlocality. {'' if alike else _REDRAWN}All maps share one scale, so that brightness is comparable.",
            partial(self._map_figure, maps, rows={0: "initial", first: "now"}, apart={first}),
        )

    @figure("initialization_norm", "Bias and weight of the initial Φp", "PerViT, Fig. S1")
    def _norm(self, findings: Findings) -> Plot:
        maps = _last_norm_maps(self.model, self.grid, self.query)
        return Plot(
            "Size and strength of the initial Φp, for the framed query. First row: the bias of the last instance norm grows from "
            f"{NORM_BIAS[0]:g} to {NORM_BIAS[1]:g}, its weight is 1. Second row: the weight falls from {NORM_WEIGHT[0]:g} to "
            f"{NORM_WEIGHT[1]:g}, the bias is 0. Third row: both, the peripheral initialization of the layers. The paper does not say "
            "what the other of the two is in the first two rows; these are instance norm's defaults.",
            partial(self._map_figure, maps, rows=("bias", "weight", "both")),
        )

    def _map_figure(self, maps: Tensor, **drawing: Any) -> Figure:
        """Maps (rows, layers, side, side) of Φp."""
        return map_figure(maps, PHI["phi_p"], self.query, columns=numbers(maps.shape[1]), limits=(0.0, 1.0), **drawing)


@torch.no_grad()
def initial_maps(model: PhiModel, grid: tuple[int, int], query: tuple[int, int]) -> Tensor:
    """Φp of a query before training, (layers, heads, rows, columns) on the CPU: of new networks with the model's design. What that draws
    at random is drawn anew: an initialization of the same kind, not the one that the model had."""
    design, depth = model.phi_design, len(model.blocks)
    assert design is not None, NO_PHI_P
    heads = model.blocks[0].attn.heads
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if design.distance == "learned":
            distance = position.LearnedVectors(4 * heads, grid, design.border)(grid)
        else:
            distance = position.position_distances(*grid, torch.device("cpu"), torch.get_default_dtype(), design.border)
        scale, offset = DistanceScales(4 * heads, design.init)()
        layers = [PeripheralPosition(heads, layer, depth, design) for layer in range(depth)]
    return torch.stack([_query_map(layer(distance, scale, offset), grid, query) for layer in layers])


@torch.no_grad()
def _last_norm_maps(model: PhiModel, grid: tuple[int, int], query: tuple[int, int]) -> Tensor:
    """(3, layers, rows, columns): the initial Φp with the bias of Fig. S1, with its weight, with both."""
    depth = len(model.blocks)
    network = PeripheralPosition(1, 0, 1)
    distance = position.position_distances(*grid, torch.device("cpu"), torch.get_default_dtype())
    scale, offset = DistanceScales(4)()
    biases, weights = torch.linspace(*NORM_BIAS, depth).tolist(), torch.linspace(*NORM_WEIGHT, depth).tolist()
    maps = []
    for bias, weight in [(bias, 1.0) for bias in biases] + [(0.0, weight) for weight in weights] + list(zip(biases, weights)):
        nn.init.constant_(network.norm2.bias, bias)
        nn.init.constant_(network.norm2.weight, weight)
        maps.append(_query_map(network(distance, scale, offset), grid, query)[0])
    return torch.stack(maps).unflatten(0, (3, depth))


def _query_map(log_phi: Tensor, grid: tuple[int, int], query: tuple[int, int]) -> Tensor:
    """log Φp (heads, N, N) -> Φp of the query, (heads, rows, columns)."""
    return log_phi[:, query[0] * grid[1] + query[1]].exp().unflatten(1, grid)


_LAYERS = (3, 4, 8)  # of Fig. 6, from 1
_HEADS = 4  # shown side by side; PerViT-T has no more
# Symbol of an attention -> maps of one image and query, heads sorted: (layers, heads, rows, columns)
_Parts = Mapping[str, Tensor]


class ImagesChapter(PeripheralChapter):
    """``examples`` and a figure of all layers for each of them, and one of the paper's layers for all."""

    def lacks(self, name: str) -> str | None:
        if not self.has_phi_c:
            return NO_PHI_C
        return None if self.request.examples else "It shows examples: pass --data and --examples."

    @figure("attention_images", "Attention over images", "PerViT, Fig. 6", "examples")
    def _images(self, findings: Findings) -> Plot:
        examples = self.request.examples
        self._shown = [self._parts(example) for example in examples]
        unit = "phi_c: [layer][place][row][column], Φc of the query; heads in head_order, if there is one"
        kept = [{"key": example.key, "phi_c": parts[PHI["phi_c"]]} for example, parts in zip(examples, self._shown)]
        findings.measure("example_maps", kept, unit, 4)
        heads = self._shown[0][PHI["phi_c"]].shape[1]
        fewer = f", {_HEADS} of them from the most local to the most global" if heads > _HEADS else ""
        return Plot(
            f"Attention of one query (framed: {self.query_text}) at three depths: the position-based Φp, which is the same for all images, "
            f"above; then, for each image, the content-based Φc and their product Φa. A column is a head, {self._heads()}{fewer}. Every map "
            "has its own colours, from its least to its largest value.",
            partial(_few_layers, examples, self._shown, self.query),
        )

    @figure("attention_image", "Attention on an image", "PerViT, Fig. S12 to S14", "examples")
    def _image(self, findings: Findings) -> list[Plot]:
        return [
            Plot(
                f"All layers for {example.key} ({example.label}); the query is framed. Columns are layers; rows are {self._heads()}. Every "
                "map has its own colours, from its least to its largest value.",
                partial(_all_layers, example, parts, self.query),
                title=f"Attention on image {number}",
            )
            for number, (example, parts) in enumerate(zip(self.request.examples, self._shown), start=1)
        ]

    def _heads(self) -> str:
        return "the heads sorted by Ωp" if self.has_phi_p else "the heads in the model's order"

    def _parts(self, example: Example) -> _Parts:
        """Φc, and with Φp all three, on the CPU. Without Φp, Φa is Φc."""
        phi_c = self.maps_on(example, "phi_c").float()
        if not self.has_phi_p:
            return {PHI["phi_c"]: phi_c}
        phi_p, phi_c = reordered(self.query_maps(), self.order), reordered(phi_c, self.order)
        return {PHI["phi_p"]: phi_p, PHI["phi_c"]: phi_c, PHI["attention"]: phi_p * phi_c}


def _few_layers(examples: Sequence[Example], of_images: Sequence[_Parts], query: tuple[int, int]) -> Figure:
    """Fig. 6: a row of Φp, then two rows an image; a column for each of the layers and heads."""
    depth, heads, patches, _ = of_images[0][PHI["phi_c"]].shape
    layers = [layer for layer in _LAYERS if layer <= depth]
    shown = torch.linspace(0, heads - 1, min(heads, _HEADS)).round().int().tolist()
    static = {name: maps for name, maps in of_images[0].items() if name == PHI["phi_p"]}
    blocks: list[tuple[Example | None, _Parts]] = [(None, static)] if static else []
    for image, parts in zip(examples, of_images):
        blocks.append((image, {name: maps for name, maps in parts.items() if name not in static}))
    heights = [len(parts) for _, parts in blocks]
    figure = new_figure(0.58 * len(shown) * len(layers) + 2.4, 0.64 * sum(heights) + 0.1 * len(blocks) + 0.4)
    widths = (2, *[len(shown)] * len(layers))
    grid = figure.add_gridspec(len(blocks), 1 + len(layers), height_ratios=heights, width_ratios=widths)
    figure.set_layout_engine("constrained", wspace=0.1)  # layers stand further apart than heads
    for number, (example, parts) in enumerate(blocks):
        if example is not None:
            show_image(figure.add_subplot(grid[number, 0]), example.pixels, query, patches)
        for column, layer in enumerate(layers):
            axes = figure.add_subplot(grid[number, 1 + column])
            labels = list(parts) if column == 0 else ()
            maps = [stretched(maps[layer - 1][shown]) for maps in parts.values()]
            draw_maps(axes, maps, query, rows=labels, cmap=ATTENTION, vmin=0, vmax=1)
            axes.set_title("" if number else f"Layer {layer}")
    return figure


def _all_layers(example: Example, parts: _Parts, query: tuple[int, int]) -> Figure:
    """A block for each of Φp, Φc and Φa, one under the other, heads by layers, with the image beside."""
    layers, heads = parts[PHI["phi_c"]].shape[:2]
    starts = {index * heads: name for index, name in enumerate(parts)}
    maps = torch.cat(list(parts.values()), dim=1).transpose(0, 1)
    layout: dict[str, Any] = {"rows": starts, "columns": numbers(layers), "apart": list(starts)[1:]}
    return map_figure(maps, "", query, own_scales=True, cell=0.5, picture=example.pixels, **layout)


def reordered(values: Tensor, order: Tensor) -> Tensor:
    """(layers, heads, ...) with the heads of each layer in the given order (layers, heads)."""
    return torch.stack([layer[heads] for layer, heads in zip(values, order)])
