"""PerViT: the learned Φp of one query, all layers and heads (Fig. 4, S6, S7, S9 to S11), and Φp at initialization (Fig. 2, S1)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pipeline.analysis.chapters.pervit_drawing import OWN_SCALE, PHI, map_figure, stretched
from pipeline.analysis.chapters.pervit_position import NO_PHI_P, PeripheralChapter, finite, reordered, rounded
from pipeline.analysis.findings import Findings, Plot
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

    def add_findings(self, findings: Findings) -> None:
        if not self.has_phi_p:
            findings.omitted["phi_p"] = findings.omitted["initialization"] = NO_PHI_P
            return
        findings.measure("query", list(self.query), "row and column of the token whose maps are shown, from 0")
        maps, order, omega = self.query_maps(), self.order(), self.phi_p_nonlocality()
        findings.measure("head_order", order, "[layer][place], heads from 0 as the figures sort them, the most local first")
        findings.measure("phi_p_maps", rounded(maps), "[layer][head][row][column], Φp of the query, 0 to 1")
        caption = (
            f"Position-based attention Φp of one query (framed: {self.query_text}). Columns are layers; in each the heads are sorted by "
            "their nonlocality Ωp, which is written above a map in patches. Every map has its own colours, from its least to its largest "
            "value."
        )
        draw = partial(_own_scale, reordered(maps, order), reordered(omega, order), self.query)
        findings.plots.append(Plot("phi_p", "Learned position-based attention", caption, "PerViT, Fig. 4 and S9 to S11", draw))
        self._add_initialization(findings, reordered(maps, order))

    def _add_initialization(self, findings: Findings, trained: Tensor) -> None:
        start = initial_maps(self.model, self.grid, self.query)  # (layers, heads, rows, columns)
        alike = bool((start == start[:, :1]).all())
        start = start[:, :1] if alike else start
        findings.measure(
            "initialization.phi_p_maps", rounded(start), "[layer][head][row][column]; one head where all are alike"
        )
        distance = (trained - start).abs().mean(dim=(1, 2, 3))
        findings.measure(
            "initialization.mean_change",
            finite(distance),
            "[layer], mean |Φp - initial Φp| of the query's maps, heads of Φp sorted",
        )
        caption = (
            f"Φp of the query (framed: {self.query_text}) as training began{', the same for all heads,' if alike else ''} and as it is "
            f"now, heads sorted by nonlocality. {'' if alike else _REDRAWN}All maps share one scale, so that brightness compares."
        )
        draw = partial(_beside_initialization, start, trained, self.query)
        findings.plots.append(Plot("initialization", "Φp at initialization and now", caption, "PerViT, Fig. 2 and S1", draw))
        assert self.model.phi_design is not None
        if self.model.phi_design == PhiDesign():
            caption = (
                "Size and strength of the initial Φp, for the framed query. First row: the bias of the last instance norm grows from "
                f"{NORM_BIAS[0]:g} to {NORM_BIAS[1]:g}, its weight is 1. Second row: the weight falls from {NORM_WEIGHT[0]:g} to "
                f"{NORM_WEIGHT[1]:g}, the bias is 0. Third row: both, the peripheral initialization of the layers. The paper does not say "
                "what the other of the two is in the first two rows; these are instance norm's own."
            )
            draw = partial(_bias_and_weight, _last_norm_maps(self.model, self.grid, self.query), self.query)
            findings.plots.append(
                Plot("initialization_norm", "Bias and weight of the initial Φp", caption, "PerViT, Fig. S1", draw)
            )
        else:
            findings.omitted["initialization_norm"] = (
                "The paper shows it for its own Φp (Euc + N + ML) with peripheral initialization, which this model does not have."
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


def _bias_and_weight(maps: Tensor, query: tuple[int, int]) -> Figure:
    return map_figure(maps, query, PHI["phi_p"], rows={0: "bias", 1: "weight", 2: "both"})
