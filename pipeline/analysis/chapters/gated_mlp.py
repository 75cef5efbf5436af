"""Token mixing of gMLP and PosMLP (Wang et al., "PosMLP", ACM MM 2022): maps, biases and the covariance of the Gaussians.

All of it is a function of the weights; no image is needed. A map mixes the tokens of a window: with PosMLP the windows of a stage
share it, and a token of stage i is a patch of 4 · 2^(i-1) pixels. With shifted windows, a window that is cut by the image's border
has the same map without the pairs that the border separates.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from pipeline.analysis.chapter import Chapter
from pipeline.analysis.chapters import gated_mlp_figures as figures
from pipeline.analysis.chapters.gated_mlp_measures import (
    SINGULAR,
    covariance_gain,
    mixing_layers,
    spread,
    token_mixing_distance,
)
from pipeline.analysis.findings import Findings, Plot
from pipeline.models.common.base import VisionModel
from pipeline.models.gated_mlp.gmlp import GMLP
from pipeline.models.gated_mlp.posmlp import PosMLP
from pipeline.models.gated_mlp.token_mixing import GaussianMap


class GatedMLPChapter(Chapter):
    """Token-mixing maps (PosMLP, Fig. 1d-e, 4), bias maps (Fig. 5), rows of the maps (Fig. 7), g(Σ) (Fig. 8)."""

    model: GMLP | PosMLP

    @classmethod
    def applies(cls, model: VisionModel) -> bool:
        return isinstance(model, GMLP | PosMLP)

    def add_findings(self, findings: Findings) -> None:
        self._layers = mixing_layers(self.model)
        self._labels = [
            str(i) if each.stage is None else f"{i} (stage {each.stage})" for i, each in enumerate(self._layers, start=1)
        ]
        self._mixing = self.model.switches.mixing
        findings.measure("token_mixing_layers.stage", [each.stage for each in self._layers], "[layer], from 1; null: gMLP")
        findings.measure("token_mixing_layers.window", [each.window for each in self._layers], "[layer], side in tokens")
        self._add_maps(findings)
        self._add_distances(findings)
        self._add_rows(findings)
        self._add_biases(findings)
        self._add_covariance(findings)

    def _add_maps(self, findings: Findings) -> None:
        single = max(len(each.map()) for each in self._layers) == 1
        shown = spread(len(self._layers), len(self._layers) if single else 8)
        queries, maps, groups = [], [], []
        for layer in (self._layers[i] for i in shown):
            window, all_groups = layer.window, layer.map()
            row, column = layer.query(self.request.query, self.request.image_size)
            chosen = spread(len(all_groups), 8)
            queries.append((row, column))
            groups.append(chosen)
            maps.append(all_groups[chosen, row * window + column].unflatten(-1, (window, window)))  # (chosen, window, window)
        findings.measure("token_mixing_maps.layers", [i + 1 for i in shown], "[shown layer], from 1")
        findings.measure(
            "token_mixing_maps.groups", [[i + 1 for i in each] for each in groups], "[shown layer][shown group], from 1"
        )
        findings.measure("token_mixing_maps.queries", queries, "[shown layer][row, column of the query in the window]")
        findings.measure(
            "token_mixing_maps.weights", [_rounded(each) for each in maps], "[shown layer][shown group][row][column of the key]"
        )
        signed = self._mixing != "ggqpe"
        findings.plots.append(
            Plot(
                "token_mixing_maps",
                "Token-mixing maps of a query",
                f"Weights with which the tokens of a window are summed into the framed query, by layer and channel group "
                f"(model.switches.mixing: {self._mixing}). Each map is divided by its largest {'magnitude' if signed else 'weight'}, so "
                f"that colours show shape and not size. {self._windows()}",
                "PosMLP, Fig. 1d, 1e and 4",
                partial(figures.mixing_maps, maps, queries, [self._labels[i] for i in shown], groups, signed),
            )
        )

    def _windows(self) -> str:
        if isinstance(self.model, GMLP):
            return "The window is the whole image, in patches of 16 pixels."
        windows = list(dict.fromkeys((each.stage, each.window) for each in self._layers))
        sides = ", ".join(f"{side} x {side}" for _, side in windows)
        return f"The windows of stages 1 to 4 have {sides} tokens, of 4, 8, 16 and 32 pixels; a window of fewer tokens is drawn as large as the others."

    def _add_distances(self, findings: Findings) -> None:
        distances = [token_mixing_distance(each.map(), each.window) for each in self._layers]
        uniform = [
            token_mixing_distance(torch.ones(each.window**2, each.window**2), each.window).item() for each in self._layers
        ]
        findings.measure("token_mixing_distance", [each.tolist() for each in distances], "[layer][group], patches of the layer")
        findings.measure("token_mixing_distance_uniform", uniform, "[layer], patches of the layer: of equal weights")
        findings.plots.append(
            Plot(
                "token_mixing_distance",
                "Distance that token mixing bridges",
                "Mean distance between a query and the tokens that the map sums into it, by the magnitude of their weights (ConViT's "
                "Eq. 8, of the map with rows that sum to 1). One point per channel group, in patches of the layer's stage; the dashed "
                "line is a map of equal weights.",
                "PosMLP has no such figure; the measure is that of ConViT, Fig. 5",
                partial(figures.per_group, distances, "mean distance, patches", self._stages(), reference=uniform),
            )
        )

    def _stages(self) -> list[int | None]:
        return [each.stage for each in self._layers]

    def _add_rows(self, findings: Findings) -> None:
        shown = spread(len(self._layers), 4)
        parts = [self._layers[i].parts() for i in shown]
        rows = []
        for layer in (self._layers[i] for i in shown):
            row, column = layer.query(self.request.query, self.request.image_size)
            rows.append(row * layer.window + column)
        findings.measure("token_mixing_rows.layers", [i + 1 for i in shown], "[shown layer], from 1")
        findings.measure("token_mixing_rows.rows", rows, "[shown layer], index of the query, from 0, row by row of the window")
        weights = [{name: _rounded(each[row]) for name, each in of_layer.items()} for of_layer, row in zip(parts, rows)]
        findings.measure("token_mixing_rows.weights", weights, "[shown layer]{map}[key]")
        findings.plots.append(
            Plot(
                "token_mixing_rows",
                "Token-mixing maps as matrices, and a row of them",
                "Queries down, keys across, both row by row of the window; at the right, the marked row (the query of the maps above) "
                "as a curve over the keys. W has a weight for each pair of tokens and r for each relative position, which repeats along "
                "the diagonals. The paper draws row 40.",
                "PosMLP, Fig. 7",
                partial(figures.mixing_rows, parts, rows, [self._labels[i] for i in shown], self._mixing != "ggqpe"),
            )
        )

    def _add_biases(self, findings: Findings) -> None:
        biases = [
            each.gate.bias.detach().double().cpu().flatten().unflatten(0, (each.window, each.window))
            for each in self._layers
            if each.gate.bias is not None
        ]
        if not biases:
            findings.omitted["bias_maps"] = "The model has no bias after token mixing (model.switches.token_bias: false)."
            return
        findings.measure("token_bias", [each.tolist() for each in biases], "[layer][row][column], b of Eq. 15 (gMLP: Eq. 1)")
        findings.plots.append(
            Plot(
                "bias_maps",
                "Bias of every token",
                "The scalar that is added to each token of a window after mixing. Colours show the difference from the layer's mean in "
                "standard deviations; both figures are above each map. PosMLP's windows of a stage share it.",
                "PosMLP, Fig. 5",
                partial(figures.bias_maps, biases, self._labels),
            )
        )

    def _add_covariance(self, findings: Findings) -> None:
        gaussians = [each.gate.mixing for each in self._layers if isinstance(each.gate.mixing, GaussianMap)]
        if not gaussians:
            findings.omitted["covariance_gain"] = (
                f"Σ is that of the Gaussian maps of ggqpe, and model.switches.mixing is {self._mixing}."
            )
            return
        gains = [covariance_gain(each.covariance().detach().cpu()) for each in gaussians]
        means = [each.nanmean().item() for each in gains]
        findings.measure(
            "covariance_gain", [_nullable(each.tolist()) for each in gains], "[layer][group], 1/patches²; null: left out"
        )
        findings.measure("covariance_gain_mean", _nullable(means), "[layer], 1/patches²: g(Σ) of Eq. 16")
        left_out = [int(each.isnan().sum()) for each in gains]
        findings.measure("covariance_left_out", left_out, f"[layer], groups with an eigenvalue below {SINGULAR:g}")
        centers = [(each.centers.detach().double().cpu() * torch.tensor([1.0, -1.0])).tolist() for each in gaussians]
        findings.measure("token_mixing_centers", centers, "[layer][group][right, down], patches: Δ of Eq. 5, from the query")
        form = {"semidefinite": "ΓΓᵀ", "free": "Γ, of which this is the symmetric part", "isotropic": "αI"}[
            gaussians[0].covariance_form
        ]
        findings.plots.append(
            Plot(
                "covariance_gain",
                "Locality of the Gaussians: g(Σ)",
                f"Square root of the product of Σ's eigenvalues, one point per channel group, and their mean g(Σ) (Eq. 16); Σ = {form}. "
                f"Small values: a wide Gaussian, non-local. {sum(left_out)} of {sum(map(len, gains))} groups with an eigenvalue below "
                f"{SINGULAR:g}, which are all but constant along an axis, are left out, as in the paper.",
                "PosMLP, Fig. 8",
                partial(figures.per_group, gains, "g(Σ), 1/patches²", self._stages()),
            )
        )


def _rounded(values: Tensor) -> list:
    """Lists with six significant decimals: a map has thousands of numbers."""
    scale = float(values.abs().max()) or 1.0
    decimals = 6 - int(torch.tensor(scale).log10().floor())
    return values.round(decimals=decimals).tolist()


def _nullable(values: Sequence[float]) -> list[float | None]:
    return [None if value != value else value for value in values]
