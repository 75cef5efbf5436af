"""Self-attention of any family with a square grid of tokens (DeiT, DeiT III, ConViT, PerViT): how far heads look (ConViT, Eq. 8, Fig. 5).

What other chapters on attention share is here too, and what DeiT has: nonlocality Ω, attention maps of images, and maps averaged
over images (ConViT, Fig. 10, 15 and 16; PerViT, Appendix D, Fig. S4). Its Ω is that of PerViT's Appendix D for models without Φp: of
Φa = exp(Q Kᵀ) with the row maximum subtracted before exp, not of ConViT's rows, which sum to 1. The class token has no place: Ω leaves
it out, as query and as key; the row maximum is over all tokens, as in the model. With iRPE, Φc = exp(Q Kᵀ), Φp = exp(R) of its scores R,
which depend on the query's content, and Φa = Φc ⊙ Φp (footnote 14). Ω and Ψ are taken of each image and averaged.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from pipeline.analysis.chapter import Chapter, Example, Findings, Plot, Request, figure
from pipeline.analysis.maps import map_figure, overlay_grid
from pipeline.analysis.measures import AttentionDistance, PhiMeasures, QueryMaps, patches_per_unit
from pipeline.analysis.style import Figure, layer_plot, layer_plots, numbers, patches_beside
from pipeline.models.common.probe import recorded
from pipeline.models.common.vit import patch_grid
from pipeline.models.convit import ConViT
from pipeline.models.deit import DeiT, DeiT3
from pipeline.models.pervit.model import PerViT

_MAPS = "[layer][head][row][column], attention of the query to each patch; with the class token's share a row sums to 1"
_DIGITS = 6  # significant, of maps in analysis.json


class GridChapter(Chapter):
    """Base of the chapters on attention over one grid of patches."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.grid = rows, columns = patch_grid(request.image_size, request.image_size, request.model.patch)
        self.query = request.query or (rows // 2, columns // 2)  # of the patch whose maps are shown
        self.query_index = self.query[0] * columns + self.query[1]  # its number, row by row
        self.per_unit = patches_per_unit(rows)

    @property
    def omega_unit(self) -> str:
        """The unit of Ω, for captions."""
        return f"in coordinates that go from -1 to 1 over a side, as the paper's (1 is {self.per_unit:g} patches: the axis on the right)"

    def measure_omega(self, findings: Findings, omega: dict[str, Tensor]) -> None:
        """Record Ω, (layers, heads) by the attention's name, in the unit of PerViT's figures, and in patches beside it."""
        unit = "[layer][head], coordinates of [-1, 1]; times patches_per_unit: nonlocality_in_patches"
        findings.measure("patches_per_unit", self.per_unit, "patches in the unit of nonlocality, (rows - 1) / 2")
        for name, values in omega.items():
            findings.measure(f"nonlocality.{name}", values, unit)
            findings.measure(f"nonlocality_in_patches.{name}", values * self.per_unit, "[layer][head], patches")

    def measure_impact(self, findings: Findings, seen: PhiMeasures) -> dict[str, Tensor]:
        """Record Ψ of Φp and Φc, (layers, heads) by the attention's name; returns it."""
        psi = {"phi_p": seen.mean("psi_p"), "phi_c": seen.mean("psi_c")}
        for name, values in psi.items():
            findings.measure(f"impact.{name}", values, "[layer][head], no unit; null: infinite, both attentions are equal")
        return psi

    def query_row(self, attention: Tensor) -> Tensor:
        """The query's attention to the patches, (..., M, M) -> (..., rows, columns); what comes before the patches is left out."""
        tokens = self.grid[0] * self.grid[1]
        return attention[..., -tokens:, -tokens:][..., self.query_index, :].unflatten(-1, self.grid)

    @torch.no_grad()
    def attention_on(self, example: Example, probe: str = "attention") -> list[Tensor]:
        """Attention of each layer, (heads, M, M), on the CPU."""
        with recorded(probe) as values:
            self.model(example.image[None])
        return [value[0].cpu() for value in values[probe]]

    def maps_on(self, example: Example, probe: str = "attention") -> Tensor:
        """The query's attention: (layers, heads, rows, columns), on the CPU."""
        return torch.stack([self.query_row(layer) for layer in self.attention_on(example, probe)])

    def plots_on_examples(self, caption: str, maps: Sequence[Tensor], draw: Callable[..., Figure]) -> list[Plot]:
        """A figure of each example. Args: maps: of each; draw: takes them, the query and the image."""
        return [
            Plot(caption, partial(draw, of_image, self.query, example.pixels), f"Attention on {example.label} ({example.key})")
            for example, of_image in zip(self.request.examples, maps)
        ]


class AttentionChapter(GridChapter):
    """Mean attention distance per layer and head."""

    models = (DeiT, DeiT3, ConViT, PerViT)

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._distance = self.collect(AttentionDistance(self.grid))

    @figure("attention_distance", "Mean attention distance", "ConViT, Eq. 8 and Fig. 5, at one point in training", "images")
    def _distances(self, findings: Findings) -> Plot:
        distance, even = self._distance.mean("distance"), float(self._distance.distances.mean())
        findings.measure("mean_attention_distance", distance, "[layer][head], patches")
        return Plot(
            "How far from the query a head looks: the mean distance of the patches that it attends to, weighted by the attention, in "
            f"patches, over all queries and {self.count:,} images. One bar per head. Attention spread evenly over "
            f"the grid gives {even:.2f} (dashed).",
            partial(layer_plot, distance, "Distance in patches", dashed=("even attention", even)),
        )


class DeiTChapter(GridChapter):
    """DeiT with any of its switches; what Φp adds is in PerViT's chapters."""

    model: DeiT
    models = (DeiT,)

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._average = self.collect(QueryMaps(self.query_row))
        if self.model.phi_design is None:  # its nonlocality and impact are in PerViT's chapters
            self._measures = self.collect(PhiMeasures(self.grid, "attention", self.model.relative_position))
        if self.model.relative_position:
            self._phi_p = self.collect(QueryMaps(self.query_row, "phi_p"))

    def lacks(self, name: str) -> str | None:
        """Nothing is said of Ψ of a model that has no second attention, and of Φp, Ω and Ψ of one that PerViT's chapters measure."""
        measured_there = self.model.phi_design is not None and name in ("nonlocality", "impact", "phi_p")
        if name == "phi_p" and not measured_there and not self.model.relative_position:
            if len(self.model.position_generators):
                return "Its positions come from convolutions of the tokens (CPVT), which weigh no pairs of patches."
            return "Its positions are added to the tokens, and give no attention."
        return "" if measured_there or (name == "impact" and not self.model.relative_position) else None

    @figure("nonlocality", "Nonlocality", "PerViT, Eq. 13, Appendix D and Fig. S4, left", "images")
    def _nonlocality(self, findings: Findings) -> Plot:
        omega = self._measures.mean("omega_a")
        self.measure_omega(findings, {"attention": omega})
        times = ", times exp(R) of iRPE's scores R" if self.model.relative_position else ""
        return Plot(
            f"Ω of each head: attention before its rows are normalized, exp(Q Kᵀ) with each row's maximum at 1{times}, times the distance "
            f"between query and key, mean over all pairs of patches and {self.count:,} images, {self.omega_unit}. Unlike the mean "
            "attention distance it grows with the number of keys that a head attends to.",
            lambda: patches_beside(layer_plot(omega, "$\\Omega_a$"), self.per_unit),
        )

    @figure("impact", "Impact of content and position", "PerViT, Eq. 12, Appendix D and Fig. S4, middle and right", "images")
    def _impact(self, findings: Findings) -> Plot:
        psi = self.measure_impact(findings, self._measures)
        panels = {"Content, $\\Psi_c$": psi["phi_c"], "Position (iRPE), $\\Psi_p$": psi["phi_p"]}
        return Plot(
            "Ψ of each head: the inverse of the Frobenius distance of the attention by content alone (above), or by position alone "
            f"(below), from their product, mean over {self.count:,} images. The higher, the closer the product is to that attention.",
            partial(layer_plots, panels, "Impact"),
        )

    @figure("phi_p", "Position-based attention of iRPE", "PerViT, Fig. S5", "images")
    def _phi_p_maps(self, findings: Findings) -> Plot:
        maps = self._phi_p.mean("maps")  # (layers, heads, rows, columns)
        unit = "[layer][head][row][column], exp(R) of iRPE's scores R of the query, mean over the images"
        findings.measure("phi_p_maps", maps, unit, _DIGITS)
        labels: dict[str, Any] = {"rows": numbers(maps.shape[1]), "columns": numbers(len(maps)), "ylabel": "Head"}
        return Plot(
            "Φp = exp(R) of iRPE's scores R from the marked patch to all patches. They depend on the query's content: this is the mean "
            f"over {self.count:,} images. One column per layer, one row per head, each map with its own colours.",
            partial(map_figure, maps.transpose(0, 1), "$\\Phi_p$", self.query, own_scales=True, cell=0.8, **labels),
        )

    @figure("average_maps", "Attention averaged over images", "ConViT, Fig. 15", "images")
    def _average_maps(self, findings: Findings) -> Plot:
        maps = self._average.mean("maps")  # (layers, heads, rows, columns)
        findings.measure("average_attention", maps, f"{_MAPS}, mean over the images", _DIGITS)
        return Plot(
            "Attention of the marked patch to all patches, mean over the images, which leaves what does not depend on their content. "
            "One column per layer, one row per head; the colours are logarithmic.",
            partial(_draw_maps, maps, self.query),
            title=f"Attention averaged over {self.count:,} images",
        )

    @figure("class_attention", "What the class token attends to", "DeiT's counterpart of PerViT, Fig. S12 to S14", "examples")
    def _class_attention(self, findings: Findings) -> Plot:
        unit = "[example][head][row][column], attention of the last layer's class token to each patch"
        maps = [of_class for _, of_class in self._shown]
        pixels, labels = zip(*((example.pixels, example.label) for example in self.request.examples))
        findings.measure("class_attention", maps, unit, _DIGITS)
        return Plot(
            "Attention of the class token in the last layer, from which the class is read, on the images themselves. One row per "
            "image, one column per head; the colours of each picture end at its largest value.",
            partial(overlay_grid, pixels, maps, labels, [f"Head {head}" for head in numbers(len(maps[0]))]),
        )

    @figure("attention_maps", "Attention on an image", "ConViT, Fig. 16 and 17", "examples")
    def _attention_maps(self, findings: Findings) -> list[Plot]:
        maps = [of_query for of_query, _ in self._shown]
        findings.measure("attention_maps", maps, f"[example]{_MAPS}; examples in the order of examples", _DIGITS)
        caption = "Attention of the marked patch to all patches. Columns are layers, rows heads; the colours are logarithmic."
        return self.plots_on_examples(caption, maps, _draw_maps)

    @cached_property
    def _shown(self) -> list[tuple[Tensor, Tensor]]:
        """Of each example, the query's maps (layers, heads, rows, columns), and the last class token's (heads, rows, columns)."""
        shown = []
        for example in self.request.examples:
            layers = self.attention_on(example)  # (heads, N + 1, N + 1) each
            of_query = torch.stack([self.query_row(layer) for layer in layers])
            shown.append((of_query, layers[-1][:, 0, 1:].unflatten(-1, self.grid)))
        return shown


def _draw_maps(maps: Tensor, query: tuple[int, int], picture: Tensor | None = None) -> Figure:
    layers, heads = maps.shape[:2]
    limits = (max(float(maps.min()), float(maps.max()) * 1e-4), float(maps.max()))
    labels: dict[str, Any] = {"rows": numbers(heads), "columns": numbers(layers), "ylabel": "Head"}
    # layers across, which are more
    return map_figure(maps.transpose(0, 1), "Attention", query, **labels, limits=limits, log=True, picture=picture)
