"""ConViT (d'Ascoli et al., ICML 2021): gates, where position and content look, attention on images.

How far heads look (Eq. 8; Fig. 5 and 13) is in :mod:`pipeline.analysis.attention`. Layers with gated positional
self-attention (GPSA) have no class token; the attention that the others pay to it is not shown, as in the paper.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeline.analysis.attention import GridChapter
from pipeline.analysis.chapter import Example, Findings, Plot, Request, figure
from pipeline.analysis.maps import map_figure
from pipeline.analysis.measures import QueryMaps, mean_attention_distance, query_key_distances
from pipeline.analysis.style import Figure, layer_plot, numbers
from pipeline.models.common.probe import recorded
from pipeline.models.common.vit import ViTLayout
from pipeline.models.convit import ConViT, ConViTSwitches, PositionalSelfAttention, relative_positions
from pipeline.models.convit import GatedPositionalSelfAttention as GatedAttention
from pipeline.page import RED

LOCALITY_STRENGTHS = (0.1, 0.3, 1.0, 3.0)  # α of the initial maps that are shown; 1 is the paper's choice
_NEEDED = (  # figure, the switch that it needs, what is there without
    ("gates", "positional_gating", "content and position are summed before the softmax, without a gate."),
    ("gates", "train_gpsa", "all gates are frozen at their initial value."),
    ("gates", "train_gating", "all gates are frozen at 0.5."),
    ("initial_positions", "conv_init", "positions begin at random."),
)
_DIGITS = 4  # significant digits of maps in analysis.json
_LOWEST = 1e-5  # attention below it has the lowest colour of a logarithmic scale


class ConViTChapter(GridChapter):
    """Figures of ConViT, and of its ablations as far as they apply."""

    model: ConViT
    models = (ConViT,)

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._gates = gates(self.model)
        self._maps = self.collect(QueryMaps(self.query_row))

    def lacks(self, name: str) -> str | None:
        if name in ("gates", "position_maps", "position_distance", "initial_positions") and self.model.gpsa_layers == 0:
            return "model.switches.gpsa_layers is 0: a plain ViT has no positional attention."
        for figure_name, switch, without in _NEEDED:
            if name == figure_name and not getattr(self.model.switches, switch):
                return f"model.switches.{switch} is false: {without}"
        return None

    def measure(self, findings: Findings) -> None:
        findings.measure("gate", self._gates, "[layer][head], share of position in [0, 1]; null: a layer without gates")

    @figure("gates", "How much heads attend by position", "ConViT, Fig. 6 and 14")
    def _draw_gates(self, findings: Findings) -> Plot:
        return Plot(
            "The gate σ(λ) of each head: 1 attends by position alone, 0 by content alone. All begin at 0.73 (dashed). Layers without "
            "bars are plain self-attention.",
            partial(layer_plot, self._gates, "Gate σ(λ)", dashed=("initial value", 0.731), ylim=(0, 1), color=RED),
        )

    @figure("attention_maps", "Attention on an image", "ConViT, Fig. 7, 16 and 17", "examples")
    def _on_images(self, findings: Findings) -> list[Plot]:
        maps = [self.maps_on(example) for example in self.request.examples]  # (layers, heads, rows, columns) each
        findings.measure("attention_maps", maps, self._unit("", "[example][layer][head]"), _DIGITS)
        return self.plots_on_examples(
            "Attention of the marked patch to all patches, one row per layer, one column per head, on a logarithmic scale. The number "
            "above a map is its head's gate, from white (content) to red (position); layers without are plain self-attention, whose "
            "attention to the class token is not shown.",
            maps,
            self._draw_maps,
        )

    @figure("average_maps", "Attention averaged over images", "ConViT, Fig. 15", "images")
    def _average(self, findings: Findings) -> Plot:
        maps = self._maps.mean("maps")  # (layers, heads, rows, columns)
        findings.measure("average_attention", maps, self._unit("mean over the images, "), _DIGITS)
        return Plot(
            "Attention of the marked patch to all patches, mean over the images, which leaves what does not depend on their content. One "
            "row per layer, one column per head, on a logarithmic scale; the numbers are gates, from white (content) to red (position).",
            partial(self._draw_maps, maps, self.query),
            title=f"Attention averaged over {self.count:,} images",
        )

    @figure("position_distance", "How far position looks", "ConViT, Fig. 5 and 13, for the positional term")
    def _position_distance(self, findings: Findings) -> Plot:
        maps = positions(self.model, self.grid)  # (GPSA layers, heads, N, N)
        distances = mean_attention_distance(maps, query_key_distances(*self.grid))  # (GPSA layers, heads)
        found = [*distances.tolist(), *[None] * (len(self.model.blocks) - self.model.gpsa_layers)]
        initial = None
        if self.model.switches.conv_init:
            start = initial_positions(maps.shape[1], self.grid, self.model.switches.locality_strength)
            initial = float(mean_attention_distance(start, query_key_distances(*self.grid)).mean())
        findings.measure("position_distance", found, "[layer][head], patches; null: a layer without position")
        return Plot(
            "Mean distance from the query to where a head's positional term attends (Eq. 8, for the second term of Eq. 7), in patches, "
            "edges of the image included. The dashed line is the initialization's; layers without bars are plain self-attention.",
            partial(layer_plot, found, "Distance (patches)", dashed=("initial value", initial), ylim=(0, None)),
        )

    @figure("position_maps", "Where position looks", "ConViT, Fig. 3, after training")
    def _position_maps(self, findings: Findings) -> Plot:
        maps = positions(self.model, self.grid)[:, :, self.query_index].unflatten(-1, self.grid)
        findings.measure("position_maps", maps, self._unit(), _DIGITS)
        return Plot(
            "The positional term's attention from the marked patch, the same for all images: one row per GPSA layer, one column per head, on "
            "a logarithmic scale. Numbers are gates, from white (the term is not used) to red (nothing else is).",
            partial(self._draw_maps, maps, self.query),
        )

    @figure("initial_positions", "Initialized as a convolution", "ConViT, Fig. 3")
    def _initialization(self, findings: Findings) -> Plot:
        heads = positional_layers(self.model)[0].heads
        maps = {f"α = {strength:g}": initial_positions(heads, self.grid, strength) for strength in LOCALITY_STRENGTHS}
        shown = {label: of_row[:, self.query_index].unflatten(-1, self.grid) for label, of_row in maps.items()}
        layout: dict[str, Any] = {"columns": numbers(heads), "xlabel": "Head", "limits": (0.0, 1.0)}
        if self.request.examples:
            layout["picture"] = self.request.examples[0].pixels
            shown = {"content": self._untrained_content(self.request.examples[0]), **shown}
        kept = {label.replace("α = ", "alpha_"): of_row for label, of_row in shown.items()}
        unit = self._unit("", "locality strength, or untrained content -> [head]")
        findings.measure("initial_positions", kept, unit, _DIGITS)
        shares = [of_row / of_row.max() for of_row in shown.values()]
        return Plot(
            "Positional attention of the marked patch before training (Eq. 5): each head looks at one offset of the kernel, the more "
            "sharply the larger the locality strength α. Each row has a scale of its own, from 0 to its largest value."
            + (" Above, an untrained self-attention layer, which sees the image's content." if "content" in shown else ""),
            partial(map_figure, shares, "attention / largest of the row", self.query, rows=list(shown), **layout),
            more_with_images="content" not in shown,
        )

    @torch.no_grad()
    def _untrained_content(self, example: Example) -> Tensor:
        """(heads, rows, columns): attention of an untrained SA layer to an image, Fig. 3 b."""
        attention = positional_layers(self.model)[0]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layout = ViTLayout(attention.heads, attention.proj.out_features, depth=1)
            switches = ConViTSwitches(gpsa_layers=0)
            fresh = ConViT(layout, num_classes=1, image_size=self.request.image_size, switches=switches).eval()
        with recorded("attention") as values:
            fresh(example.image[None].float().cpu())
        return self.query_row(values["attention"][0])[0]

    def _draw_maps(self, maps: Tensor, query: tuple[int, int], pixels: Tensor | None = None) -> Figure:
        """Maps of a query (layers, heads, rows, columns), their gates above them, and the image (3, S, S) if there is one."""
        import matplotlib

        layers, heads = maps.shape[:2]
        low, shown = max(float(maps.min()), _LOWEST), [of_layer or () for of_layer in self._gates[:layers]]
        colors = matplotlib.colormaps["Reds"]  # white: content, red: position
        return map_figure(
            maps,
            "Attention (logarithmic)",
            query,
            rows=numbers(layers),
            columns=numbers(heads),
            xlabel="Head",
            ylabel="Layer",
            limits=(low, max(float(maps.max()), 1.01 * low)),
            log=True,
            cell=min(0.62, max(0.44, 7 / heads)),
            picture=pixels,
            notes=[[f"{gate:.2f}" for gate in of_layer] for of_layer in shown],
            note_colors=[[colors(0.75 * gate) for gate in of_layer] for of_layer in shown],
        )

    def _unit(self, what: str = "", first: str = "[layer][head]") -> str:
        row, column = self.query
        return f"{first}[row][column], {what}attention of the patch at row {row}, column {column}, counted from 0"


def positional_layers(model: ConViT) -> list[PositionalSelfAttention]:
    """The attention of the leading layers that have positional attention, with or without gates."""
    return [block.attn for block in model.blocks if isinstance(block.attn, PositionalSelfAttention)]


def gates(model: ConViT) -> list[list[float] | None]:
    """[layer][head]: the gates as they are applied, σ(λ) of Eq. 7 or a mask; None for a layer without."""
    attentions = [block.attn for block in model.blocks]
    return [each.gate().tolist() if isinstance(each, GatedAttention) else None for each in attentions]


@torch.no_grad()
def positions(model: ConViT, grid: tuple[int, int]) -> Tensor:
    """The positional term softmax(v r) of Eq. 7 in each GPSA layer: (GPSA layers, heads, N, N) on the CPU."""
    like = model.drop_path_rates
    offsets = relative_positions(*grid, like.device, like.dtype)  # (N, N, 3)
    return torch.stack([each.position_scores(offsets).softmax(-1) for each in positional_layers(model)]).cpu()


@torch.no_grad()
def initial_positions(heads: int, grid: tuple[int, int], strength: float) -> Tensor:
    """The positional term at initialization (Eq. 5) with a locality strength: (heads, N, N)."""
    attention = PositionalSelfAttention(heads, heads).double()
    torch.nn.init.zeros_(attention.position_projection.weight)  # of heads beyond the largest square, which attend to all alike
    torch.nn.init.zeros_(attention.position_projection.bias)
    attention.init_convolution(strength)
    return attention.position_scores(relative_positions(*grid, torch.device("cpu"), torch.float64)).softmax(-1)
