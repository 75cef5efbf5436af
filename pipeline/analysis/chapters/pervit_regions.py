"""PerViT: which part of the visual field each layer sees (Min et al., NeurIPS 2022, Eq. 11 and 36 to 38; Fig. 5)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipeline.analysis.chapters.pervit_position import NO_PHI_P, PeripheralChapter, finite
from pipeline.analysis.findings import Findings, Plot
from pipeline.analysis.measures import REGIONS, query_key_distances, region_radii, region_scores
from pipeline.analysis.style import BLUE, GREEN, ORANGE, PINK, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = {"c": "central", "p": "para-central", "m": "mid peripheral", "f": "far peripheral"}
_COLORS = (BLUE, GREEN, ORANGE, PINK)


class RegionsChapter(PeripheralChapter):
    """``regions``, ``region_scores``, ``region_counts`` and ``region_radii``: needs no images."""

    def add_findings(self, findings: Findings) -> None:
        if not self.has_phi_p:
            findings.omitted["regions"] = NO_PHI_P
            return
        scores = torch.stack([region_scores(phi, *self.grid) for phi in self.phi_p()]).cpu()  # (layers, heads, 4)
        regions = scores.argmax(-1)  # (layers, heads)
        others = self.other_layers()
        counts = count_regions(regions, others)  # (layers, 4)
        radii = region_radii(*self.grid)
        order = "|".join(REGIONS)
        findings.measure(
            "regions", [[REGIONS[each] for each in layer] for layer in regions.tolist()], f"[layer][head] of {order}"
        )
        findings.measure(
            "region_scores", finite(scores), f"[layer][head][{order}], attention in the region, mean over all pairs"
        )
        findings.measure("region_radii", list(radii), f"[{order}], outer radius in patches")
        findings.measure(
            "region_counts.by_layer", counts, f"[layer][{order}], heads and {others} other layers, which count as central"
        )
        findings.measure("region_counts.model", counts.sum(0), f"[{order}], the sum of region_counts.by_layer")
        caption = (
            f"{self._intervals(radii)} A head is in the region that gets most of its Φp. As in the paper the other layers count as central: "
            f"{'the 3 x 3 convolution (CPE) and ' if others == 3 else ''}the two linear layers of the MLP in each block. "
            f"The unit is one head, or one such layer.{self._empty(radii)}"
        )
        title = "Peripheral regions"
        findings.plots.append(Plot("regions", title, caption, "PerViT, Fig. 5", partial(_draw, counts)))

    def other_layers(self) -> int:
        """Layers of a block that are not heads: the two linear layers of its MLP, and its CPE if it has one."""
        return 2 + int(getattr(self.model.switches, "cpe", False))

    def _intervals(self, radii: tuple[float, ...]) -> str:
        inner, told = 0.0, []
        for region, outer in zip(REGIONS, radii):
            told.append(f"{NAMES[region]} [{inner:.2f}, {outer:.2f})")
            inner = outer
        return f"Distances from the query, in patches: {', '.join(told)}."

    def _empty(self, radii: tuple[float, ...]) -> str:
        """A sentence on regions that no pair of tokens falls into, as on a very small grid."""
        distances = query_key_distances(*self.grid)
        inner, empty = 0.0, []
        for region, outer in zip(REGIONS, radii):
            if not bool(((distances >= inner) & (distances < outer)).any()):
                empty.append(NAMES[region])
            inner = outer
        return f" On this grid no two tokens are at a {' or '.join(empty)} distance." if empty else ""


def count_regions(regions: Tensor, other_layers: int) -> Tensor:
    """Layers in each region, as Fig. 5 counts them: every head is one, and each other layer of a block is one that is central.

    Args:
        regions: (layers, heads), indices into :data:`~pipeline.analysis.measures.REGIONS`.
        other_layers: of a block; PerViT: 3, the CPE and the MLP's two linear layers (footnote 7).

    Returns:
        (layers, 4) integers.
    """
    counts = torch.nn.functional.one_hot(regions, len(REGIONS)).sum(1)  # (layers, 4)
    counts[:, 0] += other_layers
    return counts


def _draw(counts: Tensor) -> Figure:
    figure = new_figure(9.0, 3.2)
    pie, bars = figure.subplots(1, 2, width_ratios=(1, 2.2))
    total = counts.sum(0).tolist()
    present = [index for index, count in enumerate(total) if count]
    pie.pie(
        [total[index] for index in present],
        colors=[_COLORS[index] for index in present],
        autopct=lambda share: f"{share:.0f} %",
        pctdistance=1.22,
        startangle=90,
        counterclock=False,
        wedgeprops={"edgecolor": "white"},
    )
    pie.set_title("all layers")
    layers, bottom = range(1, len(counts) + 1), torch.zeros(len(counts))
    for index, region in enumerate(REGIONS):
        bars.bar(layers, counts[:, index], 0.75, bottom=bottom, color=_COLORS[index], label=NAMES[region])
        bottom = bottom + counts[:, index]
    bars.set_xticks(layers)
    bars.set(xlabel="Layer", ylabel="heads and other layers")
    bars.yaxis.get_major_locator().set_params(integer=True)
    bars.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True)
    return figure
