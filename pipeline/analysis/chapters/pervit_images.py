"""PerViT: Φp, Φc and Φa of one query over images (Min et al., NeurIPS 2022, Fig. 6 and S12 to S14)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipeline.analysis.chapter import Example
from pipeline.analysis.chapters.pervit_drawing import PHI, draw_maps, numbers, stretched
from pipeline.analysis.chapters.pervit_position import NO_EXAMPLES, NO_PHI_C, PeripheralChapter, reordered, rounded
from pipeline.analysis.findings import Findings, Plot
from pipeline.analysis.style import mark_query, new_figure
from pipeline.models.common.probe import observed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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

    def add_findings(self, findings: Findings) -> None:
        if not self.has_phi_c or not self.request.examples:
            reason = NO_EXAMPLES if self.has_phi_c else NO_PHI_C
            findings.omitted |= dict.fromkeys(("attention_images", "attention_image"), reason)
            return
        maps = [self._maps(example) for example in self.request.examples]
        for example, each in zip(self.request.examples, maps):
            findings.measures.setdefault("example_maps", []).append({"key": example.key, "phi_c": rounded(each.phi_c, 4)})
        findings.units["example_maps"] = (
            "phi_c: [layer][place][row][column], Φc of the query; heads in head_order, if there is one"
        )
        heads = "the heads sorted by Ωp" if self.has_phi_p else "the heads in the model's order"
        fewer = f", {_HEADS} of them from the most local to the most global" if maps[0].phi_c.shape[1] > _HEADS else ""
        caption = (
            f"Attention of one query (framed: {self.query_text}) at three depths: the position-based Φp, which is the same for all images, "
            f"above; then, for each image, the content-based Φc and their product Φa. A column is a head, {heads}{fewer}. Every map has "
            "its own colours, from its least to its largest value."
        )
        draw = partial(_few_layers, self.request.examples, maps, self.query)
        findings.plots.append(Plot("attention_images", "Attention over images", caption, "PerViT, Fig. 6", draw))
        for number, (example, each) in enumerate(zip(self.request.examples, maps), start=1):
            caption = (
                f"All layers for {example.key} ({example.label}); the query is framed. Columns are layers; rows are {heads}. Every map has "
                "its own colours, from its least to its largest value."
            )
            plot = Plot(
                f"attention_image_{number}",
                f"Attention on image {number}",
                caption,
                "PerViT, Fig. S12 to S14",
                partial(_all_layers, example, each, self.query),
            )
            findings.plots.append(plot)

    @torch.no_grad()
    def _maps(self, example: Example) -> _Maps:
        tokens = self.grid[0] * self.grid[1]
        contents: list[Tensor] = []

        def keep(
            name: str, value: Tensor
        ) -> None:  # only the query's row of a layer: (1, heads, N, N), class token first if any
            rows = value[0, :, -tokens:, -tokens:][:, self.query_index]  # (heads, N)
            contents.append(rows.float().cpu().unflatten(1, self.grid))

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
            _show_image(figure.add_subplot(grid[number, 0]), example, query, patches)
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
    _show_image(left, example, query, patches)
    left.set_anchor("N")
    draw_maps(right, rows, query, rows=starts, columns=numbers(layers), title="Layer", apart=list(starts)[1:])
    right.set_anchor("N")
    return figure


def _show_image(axes: Axes, example: Example, query: tuple[int, int], patches: int) -> None:
    axes.imshow(example.pixels.permute(1, 2, 0).clamp(0, 1))
    axes.set_axis_off()
    mark_query(axes, query, side=example.pixels.shape[-1] / patches)
