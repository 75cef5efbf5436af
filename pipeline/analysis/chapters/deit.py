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

from pipeline.analysis.averages import Collector
from pipeline.analysis.chapter import Chapter, Declared, Drawn, Example, Findings, Request, figure
from pipeline.analysis.chapters.attention import layer_head_plot, layer_head_plots
from pipeline.analysis.measures import impact, nonlocality, query_key_distances, rounded
from pipeline.analysis.style import image_grid, map_grid, numbers, overlay
from pipeline.models.common.base import VisionModel
from pipeline.models.common.probe import recorded
from pipeline.models.common.vit import patch_grid
from pipeline.models.deit import DeiT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAPS = "[layer][head][row][column], attention of the query to each patch; with the class token's share a row sums to 1"
_DIGITS = 6  # significant, of maps in analysis.json
_IMPACT = "[layer][head], no unit; null: infinite, both attentions are equal"


class DeiTMeasures(Collector):
    """Sums over images of ``omega``, Ω of Φa (layers, heads), and with iRPE of ``psi_p`` and ``psi_c``."""

    def __init__(self, grid: tuple[int, int], relative_position: bool) -> None:
        super().__init__(*(["phi_p"] if relative_position else []), "attention")
        self.distances = query_key_distances(*grid)
        self._phi_p: Tensor | None = None

    def see(self, name: str, value: Tensor) -> None:
        if name == "phi_p":  # (B, heads, N + 1, N + 1), before the attention of the same layer
            self._phi_p = value
            return
        self.distances = self.distances.to(value.device)
        phis = [None] * len(value) if self._phi_p is None else self._phi_p
        images = [
            self._measures(attention.double(), phi) for attention, phi in zip(value, phis)
        ]  # float64 of one image at a time
        for measure in images[0]:
            self.add(measure, self.layer, torch.stack([each[measure] for each in images]))  # (B, heads)
        self._phi_p = None

    def _measures(self, attention: Tensor, phi_p: Tensor | None) -> dict[str, Tensor]:
        """Of one image: (heads, N + 1, N + 1) -> name -> (heads,)."""
        if phi_p is None:
            mixed = (attention / attention.amax(-1, keepdim=True))[:, 1:, 1:]  # exp(scores - row maximum)
            return {"omega": nonlocality(mixed, self.distances)}
        content = attention / phi_p.double()
        content = (content / content.amax(-1, keepdim=True))[:, 1:, 1:]  # exp(Q Kᵀ - row maximum)
        position = phi_p.double()[:, 1:, 1:]
        mixed = content * position
        return {
            "omega": nonlocality(mixed, self.distances),
            "psi_p": impact(position, mixed),
            "psi_c": impact(content, mixed),
        }


class AverageMap(Collector):
    """Sum over images of ``map``, a query's attention to the patches (layers, heads, N)."""

    def __init__(self, query: int) -> None:
        super().__init__("attention")
        self.query = query

    def see(self, name: str, value: Tensor) -> None:
        self.add("map", self.layer, value[:, :, 1 + self.query, 1:])


class DeiTChapter(Chapter):
    """DeiT with any of its switches; what Φp adds is in PerViT's chapters."""

    model: DeiT

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.grid = patch_grid(request.image_size, request.image_size)
        self.query = request.query_on(self.grid)

    @classmethod
    def applies(cls, model: VisionModel) -> bool:
        return isinstance(model, DeiT)

    def make_collectors(self) -> list[Collector]:
        self._average = AverageMap(self.query[0] * self.grid[1] + self.query[1])
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
        maps = self._average.mean("map").unflatten(-1, self.grid)  # (layers, heads, rows, columns)
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
        with recorded("attention") as values:
            self.model(example.image[None])
        place = 1 + self.query[0] * self.grid[1] + self.query[1]
        layers = [each[0].cpu() for each in values["attention"]]  # (heads, N + 1, N + 1)
        maps = torch.stack([each[:, place, 1:] for each in layers])
        return maps.unflatten(-1, self.grid), layers[-1][:, 0, 1:].unflatten(-1, self.grid)


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
