"""PerViT: impact Ψ and nonlocality Ω of Φp, Φc and Φa = Φc ⊙ Φp (Min et al., NeurIPS 2022, Eq. 12 and 13; Fig. 7, 8, S8, S15, S16).

Ψ and Ω are taken for each image and averaged over the images: the mean of a measure, not the measure of a mean. The paper says so
of Ωc, Ωa and Ψc ("averaged over all test samples"). Of Ψp it does not, but Ψp too compares with Φa, which depends on the image.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipeline.analysis.averages import Collector
from pipeline.analysis.chapter import Request
from pipeline.analysis.chapters.pervit_drawing import PHI, bars_by_head
from pipeline.analysis.chapters.pervit_position import NO_IMAGES, NO_PHI_C, NO_PHI_P, PeripheralChapter, finite
from pipeline.analysis.findings import Findings, Plot
from pipeline.analysis.measures import impact, nonlocality, query_key_distances
from pipeline.analysis.style import BLUE, GREEN, ORANGE, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OMEGA = {"phi_p": "$\\Omega_p$", "phi_c": "$\\Omega_c$", "attention": "$\\Omega_a$"}
_PSI = {"phi_p": "$\\Psi_p$", "phi_c": "$\\Psi_c$"}
_UNIT = "[layer][head], patches"
# The rows of PerViT's Table 1 and S1 by the components that are there: Φp, Φc, convolutional stem, CPE.
_TABLE_1 = {"1111": "a", "0111": "b", "1011": "c", "1101": "d", "1110": "e", "0101": "f", "0110": "g", "1100": "h", "0100": "i"}


class PeripheralMeasures(Collector):
    """Sums of Ωc, Ωa and, with Φp, Ψp, Ψc over images: ``omega_c``, ``omega_a``, ``psi_p``, ``psi_c`` [layer][head].

    A class token, as query and as key, is left out, since it has no place. Without Φp, Φa is Φc.
    """

    def __init__(self, grid: tuple[int, int], has_phi_p: bool) -> None:
        super().__init__(*(["phi_p"] if has_phi_p else []), "phi_c")
        self.distances = query_key_distances(*grid)
        self._phi_p: Tensor | None = None

    def see(self, name: str, value: Tensor) -> None:
        if name == "phi_p":  # (heads, N, N), before phi_c of the same layer
            self._phi_p = value.double()
            return
        self.distances, tokens = self.distances.to(value.device), len(self.distances)
        images = [self._measures(each[..., -tokens:, -tokens:].double()) for each in value]  # float64 of one image at a time
        for measure in images[0]:
            self.add(measure, self.layer, torch.stack([each[measure] for each in images]))  # (B, heads)
        self._phi_p = None

    def _measures(self, phi_c: Tensor) -> dict[str, Tensor]:
        """Of one image: phi_c (heads, N, N) -> name -> (heads,)."""
        omega_c = nonlocality(phi_c, self.distances)
        if self._phi_p is None:
            return {"omega_c": omega_c, "omega_a": omega_c}
        mixed = phi_c * self._phi_p
        return {
            "omega_c": omega_c,
            "omega_a": nonlocality(mixed, self.distances),
            "psi_p": impact(self._phi_p, mixed),
            "psi_c": impact(phi_c, mixed),
        }


class PerViTChapter(PeripheralChapter):
    """``nonlocality.{phi_p,phi_c,attention}`` and ``impact.{phi_p,phi_c}``."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._measures = PeripheralMeasures(self.grid, self.has_phi_p)

    def collectors(self) -> list[Collector]:
        return [self._measures] if self.has_phi_c else []

    def add_findings(self, findings: Findings) -> None:
        seen = self._measures.count > 0
        omega: dict[str, Tensor] = {}
        if self.has_phi_p:
            omega["phi_p"] = self.phi_p_nonlocality()
        if not self.has_phi_c:
            omega["attention"] = omega["phi_p"]
        elif seen:
            omega["phi_c"], omega["attention"] = self._measures.mean("omega_c"), self._measures.mean("omega_a")
        for name, values in omega.items():
            findings.measure(f"nonlocality.{name}", finite(values), _UNIT)
        if omega:
            findings.plots.append(self._nonlocality_plot(omega, seen))
        else:
            findings.omitted["nonlocality"] = NO_IMAGES
        self._add_impact(findings, seen)
        if "attention" in omega:
            self._add_components(findings, omega)
        else:
            findings.omitted["nonlocality_by_component"] = NO_IMAGES

    def _nonlocality_plot(self, omega: dict[str, Tensor], seen: bool) -> Plot:
        parts = "A bar is a head, in the model's order; the line is the mean of a layer."
        if not self.has_phi_p:
            parts += f" {NO_PHI_P} So Φa is Φc."
        elif not self.has_phi_c:
            parts += f" {NO_PHI_C}"
        elif not seen:
            parts += " Ωc and Ωa need images (--data)."
        caption = (
            "How far each head attends: query-key distance, weighted with attention and averaged over all pairs, in patches. Φp is the "
            f"position-based attention, Φc the content-based one, Φa their product. {parts}"
        )
        shown = list(omega)[: 1 if len(omega) == 2 else None]  # where one attention is missing, Ωa repeats the other
        panels = {OMEGA[name]: omega[name] for name in shown}
        draw = partial(bars_by_head, panels, "nonlocality (patches)", one_scale=True)
        more = self.has_phi_c and not seen
        return Plot("nonlocality", "Nonlocality", caption, "PerViT, Fig. 8 and S16", draw, more_with_images=more)

    def _add_impact(self, findings: Findings, seen: bool) -> None:
        if not self.has_phi_p:
            findings.omitted["impact"] = f"{NO_PHI_P} So Φa is Φc."
        elif not self.has_phi_c:
            findings.omitted["impact"] = NO_PHI_C
        elif not seen:
            findings.omitted["impact"] = NO_IMAGES
        else:
            psi = {name: self._measures.mean(key) for name, key in (("phi_p", "psi_p"), ("phi_c", "psi_c"))}
            for name, values in psi.items():
                findings.measure(
                    f"impact.{name}", finite(values), "[layer][head], no unit; null: infinite, both attentions are equal"
                )
            equal = " A head without a bar has an infinite impact: both attentions are equal."
            some = not all(bool(values.isfinite().all()) for values in psi.values())
            caption = (
                "What shapes the mixed attention Φa: the inverse of its Frobenius distance from the position-based Φp (above) and from the "
                "content-based Φc (below), averaged over the images. The higher, the closer Φa is to that attention. "
                f"A bar is a head, in the model's order; the line is the mean of a layer.{equal if some else ''}"
            )
            draw = partial(bars_by_head, {_PSI[name]: values for name, values in psi.items()}, "impact", one_scale=False)
            findings.plots.append(Plot("impact", "Impact", caption, "PerViT, Fig. 7 and S15", draw))

    def _add_components(self, findings: Findings, omega: dict[str, Tensor]) -> None:
        switches = self.model.switches
        is_pervit = hasattr(switches, "conv_stem")
        parts = {
            "phi_p": self.has_phi_p,
            "phi_c": self.has_phi_c,
            "conv_stem": getattr(switches, "conv_stem", False),
            "cpe": getattr(switches, "cpe", False),
        }
        row = _TABLE_1.get("".join(str(int(each)) for each in parts.values())) if is_pervit else None
        findings.measure("components", {**parts, "table_1": row}, "what the model has, and its row of PerViT's Table 1 and S1")
        names = {**PHI, "conv_stem": "C-stem", "cpe": "CPE"}
        told = ", ".join(f"{'with' if there else 'without'} {names[part]}" for part, there in parts.items())
        title = (f"({row}) {told}" if row else told) if is_pervit else f"DeiT with {PHI['phi_p']}"
        caption = (
            "Nonlocality by layer, in patches: the line is the mean of the heads, the band reaches from the most local to the most global "
            f"head. {'The gap between Ωc and Ωa is what Φp removes. ' if 'phi_c' in omega and self.has_phi_p else ''}One checkpoint gives one curve of the paper's figure; its other curves are models that "
            "were trained without a component."
        )
        plot = Plot(
            "nonlocality_by_component", "Nonlocality by component", caption, "PerViT, Fig. S8", partial(_curves, omega, title)
        )
        findings.plots.append(plot)


def _curves(omega: dict[str, Tensor], title: str) -> Figure:
    """Mean and range of the heads by layer, (layers, heads) each."""
    axes = new_figure(6.0, 3.4).add_subplot()
    for (name, values), color in zip(omega.items(), (BLUE, GREEN, ORANGE)):
        layers = range(1, len(values) + 1)
        axes.fill_between(layers, values.amin(1), values.amax(1), color=color, alpha=0.15, linewidth=0)
        axes.plot(layers, values.mean(1), color=color, marker="o", markersize=3, label=OMEGA[name])
    axes.set_xticks(layers)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y")
    axes.set(xlabel="Layer", ylabel="nonlocality (patches)", title=title)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure = axes.get_figure(root=True)
    assert figure is not None
    return figure
