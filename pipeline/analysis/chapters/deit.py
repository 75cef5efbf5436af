"""DeiT: nonlocality Ω, attention maps of images, and maps averaged over images (ConViT, Fig. 10, 15 and 16; PerViT, Appendix D, Fig. S4).

Ω has the definition of PerViT's Appendix D for models without Φp: Φa = exp(Q Kᵀ), with the row maximum subtracted before exp. It is
not ConViT's, whose rows sum to 1 (:mod:`~pipeline.analysis.chapters.attention`). The class token has no place: Ω leaves it out, as
query and as key; the row maximum is over all tokens, as in the model. With iRPE, Φc = exp(Q Kᵀ), Φp = exp(R) of its scores R, which
depend on the query's content, and Φa = Φc ⊙ Φp (Appendix D, footnote 14). Ω and Ψ are taken of each image and averaged.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipeline.analysis.chapter import Declared, Drawn, Example, Findings, figure
from pipeline.analysis.chapters.attention import GridChapter, ImageMeasures, QueryMaps, layer_head_plot, layer_head_plots
from pipeline.analysis.measures import Collector, impact, nonlocality, rounded
from pipeline.analysis.style import image_grid, map_grid, numbers, overlay
from pipeline.models.common.base import VisionModel
from pipeline.models.deit import DeiT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAPS = "[layer][head][row][column], attention of the query to each patch; with the class token's share a row sums to 1"
_DIGITS = 6  # significant, of maps in analysis.json
_IMPACT = "[layer][head], no unit; null: infinite, both attentions are equal"


class DeiTMeasures(ImageMeasures):
    """``omega``, Ω of Φa, and with iRPE ``psi_p`` and ``psi_c``."""

    def __init__(self, grid: tuple[int, int], relative_position: bool) -> None:
        super().__init__(grid, *(["phi_p"] if relative_position else []), "attention")

    def measures(self, value: Tensor, phi_p: Tensor | None) -> dict[str, Tensor]:
        if phi_p is None:
            return {"omega": nonlocality(self._patches_at_maximum_1(value), self.distances)}
        content, position = self._patches_at_maximum_1(value / phi_p), self.patches(phi_p)
        mixed = content * position
        return {
            "omega": nonlocality(mixed, self.distances),
            "psi_p": impact(position, mixed),
            "psi_c": impact(content, mixed),
        }

    def _patches_at_maximum_1(self, attention: Tensor) -> Tensor:
        """exp(scores - row maximum) of the patches, from rows that are normalized over all tokens: (heads, M, M) -> (heads, N, N)."""
        return self.patches(attention / attention.amax(-1, keepdim=True))


class DeiTChapter(GridChapter):
    """DeiT with any of its switches; what Φp adds is in PerViT's chapters."""

    model: DeiT

    @classmethod
    def applies(cls, model: VisionModel) -> bool:
        return isinstance(model, DeiT)

    def make_collectors(self) -> list[Collector]:
        self._average = QueryMaps(self.query_index, self.tokens)
        if self.model.phi_design is not None:  # its nonlocality and impact are in PerViT's chapters
            return [self._average]
        self._measures = DeiTMeasures(self.grid, self.model.relative_position)
        return [self._average, self._measures]

    @classmethod
    def figures_of(cls, model: VisionModel) -> list[Declared]:
        """Without Ψ of a model that has no second attention, and without Ω of one that PerViT's chapters measure."""
        assert isinstance(model, DeiT)
        without = (
            {"nonlocality", "impact"} if model.phi_design is not None else set() if model.relative_position else {"impact"}
        )
        return [declared for declared in cls.declared if declared.name not in without]

    @figure("nonlocality", "Nonlocality", "PerViT, Eq. 13, Appendix D and Fig. S4, left", needs="images")
    def _nonlocality(self, findings: Findings) -> Drawn:
        omega = self._measures.mean("omega")
        findings.measure("nonlocality.attention", omega, "[layer][head], patches")
        times = ", times exp(R) of iRPE's scores R" if self.model.relative_position else ""
        return Drawn(
            f"Ω of each head: attention before its rows are normalized, exp(Q Kᵀ) with each row's maximum at 1{times}, times the distance "
            f"between query and key in patches, mean over all pairs of patches and {self.count:,} images. Unlike the mean attention "
            "distance it grows with the number of keys that a head attends to.",
            partial(layer_head_plot, omega, "$\\Omega_a$ in patches"),
        )

    @figure(
        "impact", "Impact of content and position", "PerViT, Eq. 12, Appendix D and Fig. S4, middle and right", needs="images"
    )
    def _impact(self, findings: Findings) -> Drawn:
        psi = {name: self._measures.mean(f"psi_{name[-1]}") for name in ("phi_p", "phi_c")}
        for name, values in psi.items():
            findings.measure(f"impact.{name}", values, _IMPACT)
        panels = {"Content, $\\Psi_c$": psi["phi_c"], "Position (iRPE), $\\Psi_p$": psi["phi_p"]}
        return Drawn(
            "Ψ of each head: the inverse of the Frobenius distance of the attention by content alone (above), or by position alone "
            f"(below), from their product, mean over {self.count:,} images. The higher, the closer the product is to that attention.",
            partial(layer_head_plots, panels, "Impact"),
        )

    @figure("average_maps", "Attention averaged over images", "ConViT, Fig. 15", needs="images")
    def _average_maps(self, findings: Findings) -> Drawn:
        maps = self._average.mean("maps").unflatten(-1, self.grid)  # (layers, heads, rows, columns)
        findings.measure("average_attention", rounded(maps, _DIGITS), _MAPS + ", mean over the images")
        return Drawn(
            "Attention of the marked patch to all patches, mean over the images, which leaves what does not depend on their content. "
            "One column per layer, one row per head; the colours are logarithmic.",
            partial(_draw_maps, maps, self.query),
            title=f"Attention averaged over {self.count:,} images",
        )

    @figure(
        "class_attention", "What the class token attends to", "DeiT's counterpart of PerViT, Fig. S12 to S14", needs="examples"
    )
    def _class_attention(self, findings: Findings) -> Drawn:
        self._shown = [self._attention(example) for example in self.request.examples]
        findings.measure(
            "class_attention",
            [rounded(maps, _DIGITS) for _, maps in self._shown],
            "[example][head][row][column], attention of the last layer's class token to each patch",
        )
        rows = list(zip(self.request.examples, [maps for _, maps in self._shown]))
        return Drawn(
            "Attention of the class token in the last layer, from which the class is read, on the images themselves. One row per "
            "image, one column per head; the colours of each picture end at its largest value.",
            partial(_draw_class_attention, rows),
        )

    @figure("attention_maps", "Attention on an image", "ConViT, Fig. 16 and 17", needs="examples")
    def _attention_maps(self, findings: Findings) -> list[Drawn]:
        unit = f"[example]{_MAPS}; examples in the order of examples"
        findings.measure("attention_maps", [rounded(maps, _DIGITS) for maps, _ in self._shown], unit)
        return [
            Drawn(
                "Attention of the marked patch to all patches. One column per layer, one row per head; the colours are logarithmic.",
                partial(_draw_maps, maps, self.query, example.pixels),
                title=f"Attention on {example.label} ({example.key})",
            )
            for example, (maps, _) in zip(self.request.examples, self._shown)
        ]

    def _attention(self, example: Example) -> tuple[Tensor, Tensor]:
        """The query's maps (layers, heads, rows, columns), and the class token's in the last layer (heads, rows, columns)."""
        layers = self.attention_on(example)  # (heads, N + 1, N + 1) each
        return torch.stack([self.query_row(layer) for layer in layers]), layers[-1][:, 0, 1:].unflatten(-1, self.grid)


def _draw_maps(maps: Tensor, query: tuple[int, int], picture: Tensor | None = None) -> Figure:
    layers, heads = maps.shape[:2]
    largest = float(maps.max())
    return map_grid(
        maps.transpose(0, 1),  # layers across, which are more
        numbers(heads),
        numbers(layers),
        label="Attention",
        xlabel="Layer",
        ylabel="Head",
        query=query,
        limits=(max(float(maps.min()), largest * 1e-4), largest),
        log=True,
        picture=picture,
    )


def _draw_class_attention(rows: list[tuple[Example, Tensor]]) -> Figure:
    pictures = [[example.pixels, *(overlay(example.pixels, each) for each in maps)] for example, maps in rows]
    heads = [f"Head {1 + i}" for i in range(len(rows[0][1]))]
    return image_grid(pictures, [example.label for example, _ in rows], ["Image", *heads])
