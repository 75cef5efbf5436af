"""PerViT: impact Ψ and nonlocality Ω of Φp, Φc and Φa = Φc ⊙ Φp (Min et al., NeurIPS 2022, Eq. 12 and 13; Fig. 7, 8, S8, S15, S16),
and which part of the visual field each layer sees (Eq. 11 and 36 to 38; Fig. 5).

Ψ and Ω are taken for each image and averaged over the images: the mean of a measure, not the measure of a mean. The paper says so
of Ωc, Ωa and Ψc ("averaged over all test samples"). Of Ψp it does not, but Ψp too compares with Φa, which depends on the image.
"""

from collections.abc import Iterator
from functools import cached_property, partial
from itertools import pairwise

import torch
from torch import Tensor

from pipeline.analysis import measures
from pipeline.analysis.attention import GridChapter
from pipeline.analysis.chapter import NO_IMAGES, Findings, Plot, Request, figure
from pipeline.analysis.style import Figure, layer_plots, legend_beside, new_figure, patches_beside
from pipeline.models.common.base import VisionModel
from pipeline.models.pervit.model import PerViT
from pipeline.models.pervit.phi_model import PhiModel
from pipeline.page import BLUE, GREEN, ORANGE, PINK

OMEGA = {"phi_p": "$\\Omega_p$", "phi_c": "$\\Omega_c$", "attention": "$\\Omega_a$"}
_PSI = {"phi_p": "$\\Psi_p$", "phi_c": "$\\Psi_c$"}
PHI = {"phi_p": "$\\Phi_p$", "phi_c": "$\\Phi_c$", "attention": "$\\Phi_a$"}
NO_PHI_P = "The model has no position-based attention (model.switches.phi_p=false)."
NO_PHI_C = "The model has no content-based attention (model.switches.phi_c=false): its attention is Φp, equal for all images."
# The rows of PerViT's Table 1 and S1 by the components that are there: Φp, Φc, convolutional stem, CPE.
_TABLE_1 = {"1111": "a", "0111": "b", "1011": "c", "1101": "d", "1110": "e", "0101": "f", "0110": "g", "1100": "h", "0100": "i"}
_BARS = "A bar is a head, in the model's order; the line is the mean of a layer."


class PeripheralChapter(GridChapter):
    """Base of the chapters on PerViT and its ablations, and on DeiT with Φp."""

    model: PhiModel

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        # An attention that the model lacks is 1 everywhere.
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

    @cached_property
    def omega_p(self) -> Tensor:
        """Ωp, (layers, heads) float64 on the CPU, in coordinates of [-1, 1] (PerViT, Eq. 13)."""
        distances = measures.unit_distances(*self.grid, next(self.model.parameters()).device)
        return torch.stack([measures.nonlocality(phi, distances) for phi in self.phi_p()]).cpu()

    @cached_property
    def order(self) -> Tensor:
        """(layers, heads): the heads of each layer, the most local first, as the authors draw them (PerViT, Fig. 4)."""
        return self.omega_p.argsort(dim=1, stable=True)

    def query_maps(self) -> Tensor:
        """Φp of the query: (layers, heads, rows, columns), on the CPU, in the model's order of heads."""
        return torch.stack([self.query_row(phi) for phi in self.phi_p()]).cpu()


class PerViTChapter(PeripheralChapter):
    """``nonlocality.{phi_p,phi_c,attention}`` and ``impact.{phi_p,phi_c}``."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        if self.has_phi_c:
            self._measures = self.collect(measures.PhiMeasures(self.grid, "phi_c", self.has_phi_p))

    def lacks(self, name: str) -> str | None:
        if name == "impact" and not self.has_phi_p:
            return f"{NO_PHI_P} So Φa is Φc."
        if name == "impact" and not self.has_phi_c:
            return NO_PHI_C
        there = {"nonlocality": bool(self._omega), "nonlocality_by_component": "attention" in self._omega}
        return None if there.get(name, True) else NO_IMAGES

    def measure(self, findings: Findings) -> None:
        omega: dict[str, Tensor] = {}
        if self.has_phi_p:
            omega["phi_p"] = self.omega_p
        if not self.has_phi_c:
            omega["attention"] = omega["phi_p"]
        elif self.count:
            omega["phi_c"], omega["attention"] = self._measures.mean("omega_c"), self._measures.mean("omega_a")
        self.measure_omega(findings, omega)
        self._omega = omega

    @figure("nonlocality", "Nonlocality", "PerViT, Fig. 8 and S16")
    def _nonlocality(self, findings: Findings) -> Plot:
        parts, waiting = _BARS, self.has_phi_c and not self.count
        if not self.has_phi_p:
            parts += f" {NO_PHI_P} So Φa is Φc."
        elif not self.has_phi_c:
            parts += f" {NO_PHI_C}"
        elif waiting:
            parts += " Ωc and Ωa need images (--data)."
        panels = {OMEGA[name]: values for name, values in self._omega.items()}
        if len(panels) == 2:  # one attention is missing, and Ωa repeats the other
            del panels[OMEGA["attention"]]
        return Plot(
            f"How far each head attends: query-key distance, weighted with attention and averaged over all pairs, {self.omega_unit}. Φp "
            f"is the position-based attention, Φc the content-based one, Φa their product. {parts}",
            lambda: patches_beside(layer_plots(panels, "nonlocality", one_scale=True), self.per_unit),
            more_with_images=waiting,
        )

    @figure("impact", "Impact", "PerViT, Fig. 7 and S15", "images")
    def _impact(self, findings: Findings) -> Plot:
        psi = self.measure_impact(findings, self._measures)
        equal = " A head without a bar has an infinite impact: both attentions are equal."
        some = not all(bool(values.isfinite().all()) for values in psi.values())
        return Plot(
            "What shapes the mixed attention Φa: the inverse of its Frobenius distance from the position-based Φp (above) and from the "
            "content-based Φc (below), averaged over the images. The higher, the closer Φa is to that attention. "
            f"{_BARS}{equal if some else ''}",
            partial(layer_plots, {_PSI[name]: values for name, values in psi.items()}, "impact"),
        )

    @figure("nonlocality_by_component", "Nonlocality by component", "PerViT, Fig. S8")
    def _components(self, findings: Findings) -> Plot:
        switches, omega = self.model.switches, self._omega
        is_pervit = hasattr(switches, "conv_stem")
        parts = {"phi_p": self.has_phi_p, "phi_c": self.has_phi_c}
        parts |= {name: getattr(switches, name, False) for name in ("conv_stem", "cpe")}
        row = _TABLE_1.get("".join(str(int(there)) for there in parts.values())) if is_pervit else None
        findings.measure("components", {**parts, "table_1": row}, "what the model has, and its row of PerViT's Table 1 and S1")
        names = {**PHI, "conv_stem": "C-stem", "cpe": "CPE"}
        told = ", ".join(f"{'with' if there else 'without'} {names[part]}" for part, there in parts.items())
        title = (f"({row}) {told}" if row else told) if is_pervit else f"DeiT with {PHI['phi_p']}"
        removed = "The gap between Ωc and Ωa is what Φp removes. " if "phi_c" in omega and self.has_phi_p else ""
        return Plot(
            f"Nonlocality by layer, {self.omega_unit}: the line is the mean of the heads, the band reaches from the most local to the most global "
            f"head. {removed}One checkpoint gives one curve of the paper's figure; its other curves are models that "
            "were trained without a component.",
            lambda: patches_beside(_curves(omega, title), self.per_unit),
        )


def _curves(omega: dict[str, Tensor], title: str) -> Figure:
    """Mean and range of the heads by layer, (layers, heads) each."""
    figure = new_figure(6.0, 3.4)
    axes = figure.add_subplot()
    for (name, values), color in zip(omega.items(), (BLUE, GREEN, ORANGE)):
        layers = range(1, len(values) + 1)
        axes.fill_between(layers, values.amin(1), values.amax(1), color=color, alpha=0.15, linewidth=0)
        axes.plot(layers, values.mean(1), color=color, marker="o", markersize=3, label=OMEGA[name])
    axes.grid(axis="y")
    axes.set(xlabel="Layer", ylabel="nonlocality", title=title, xticks=layers, ylim=(0, None))
    legend_beside(axes, 1.15)
    return figure


NAMES = {"c": "central", "p": "para-central", "m": "mid peripheral", "f": "far peripheral"}
REGION_COLOURS = (BLUE, GREEN, ORANGE, PINK)


class RegionsChapter(PeripheralChapter):
    """``regions``, ``region_scores``, ``region_counts`` and ``region_radii``: needs no images."""

    def lacks(self, name: str) -> str | None:
        return None if self.has_phi_p else NO_PHI_P

    @figure("regions", "Peripheral regions", "PerViT, Fig. 5")
    def _regions(self, findings: Findings) -> Plot:
        scores = torch.stack([measures.region_scores(phi, *self.grid) for phi in self.phi_p()]).cpu()  # (layers, heads, 4)
        regions = scores.argmax(-1)  # (layers, heads)
        others = 2 + int(getattr(self.model.switches, "cpe", False))  # the MLP's two linear layers, and the CPE if there is one
        counts = count_regions(regions, others)  # (layers, 4)
        radii = measures.region_radii(*self.grid)
        limits, masks = pairwise((0.0, *radii)), measures.region_masks(*self.grid)
        intervals = [f"{name} [{inner:.2f}, {outer:.2f})" for name, (inner, outer) in zip(NAMES.values(), limits)]
        empty = [name for name, inside in zip(NAMES.values(), masks) if not inside.any()]
        nowhere = f" On this grid no two tokens are at a {' or '.join(empty)} distance." if empty else ""
        order = "|".join(measures.REGIONS)
        named = [[measures.REGIONS[head] for head in layer] for layer in regions.tolist()]
        unit = f"[layer][{order}], heads and {others} other layers, which count as central"
        findings.measure("regions", named, f"[layer][head] of {order}")
        findings.measure("region_scores", scores, f"[layer][head][{order}], attention in the region, mean over all pairs")
        findings.measure("region_radii", radii, f"[{order}], outer radius in patches")
        findings.measure("region_counts.by_layer", counts, unit)
        findings.measure("region_counts.model", counts.sum(0), f"[{order}], the sum of region_counts.by_layer")
        return Plot(
            f"Distances from the query, in patches: {', '.join(intervals)}. A head is in the region that gets most of its Φp. As in the "
            f"paper the other layers count as central: {'the 3 x 3 convolution (CPE) and ' if others == 3 else ''}the two linear layers of the MLP in each block. "
            f"The unit is one head, or one such layer.{nowhere}",
            partial(_pie_and_bars, counts),
        )


def count_regions(regions: Tensor, other_layers: int) -> Tensor:
    """Layers in each region, (layers, 4), as Fig. 5 counts them: every head is one, and each of a block's ``other_layers`` (PerViT: 3,
    footnote 7) is one that is central. ``regions``: (layers, heads), indices into :data:`~pipeline.analysis.measures.REGIONS`."""
    counts = torch.nn.functional.one_hot(regions, len(measures.REGIONS)).sum(1)  # (layers, 4)
    counts[:, 0] += other_layers
    return counts


def _pie_and_bars(counts: Tensor) -> Figure:
    figure = new_figure(9.0, 3.2)
    pie, bars = figure.subplots(1, 2, width_ratios=(1, 2.2))
    total = counts.sum(0).tolist()
    present = [index for index, count in enumerate(total) if count]
    pie.pie(
        [total[index] for index in present],
        colors=[REGION_COLOURS[index] for index in present],
        autopct=lambda share: f"{share:.0f} %",
        pctdistance=1.22,
        startangle=90,
        counterclock=False,
        wedgeprops={"edgecolor": "white"},
    )
    pie.set_title("all layers")
    layers, bottom = range(1, len(counts) + 1), torch.zeros(len(counts))
    for index, region in enumerate(measures.REGIONS):
        bars.bar(layers, counts[:, index], 0.75, bottom=bottom, color=REGION_COLOURS[index], label=NAMES[region])
        bottom = bottom + counts[:, index]
    bars.set_xticks(layers)
    bars.set(xlabel="Layer", ylabel="heads and other layers")
    bars.yaxis.get_major_locator().set_params(integer=True)
    legend_beside(bars, reverse=True)
    return figure
