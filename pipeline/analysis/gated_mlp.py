"""Token mixing of gMLP and PosMLP (Wang et al., "PosMLP", ACM MM 2022): maps, biases and the covariance of the Gaussians.

All of it is a function of the weights; no image is needed. A map mixes the tokens of a window: with PosMLP the windows of a stage
share it, and a token of stage i is a patch of 4 · 2^(i-1) pixels. With shifted windows, a window that is cut by the image's border
has the same map without the pairs that the border separates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from pipeline.analysis.chapter import Chapter, Findings, Plot, Request, figure
from pipeline.analysis.maps import ATTENTION, DIVERGING, map_figure
from pipeline.analysis.measures import mean_attention_distance, query_key_distances
from pipeline.analysis.style import Figure, layer_plot, legend_beside, new_figure
from pipeline.models.common.windows import relative_index
from pipeline.models.gated_mlp.gating import GatingUnit
from pipeline.models.gated_mlp.gmlp import GMLP, PATCH
from pipeline.models.gated_mlp.posmlp import STEM_STRIDE, PosMLP
from pipeline.models.gated_mlp.token_mixing import GaussianMap
from pipeline.page import COLOURS, RED

SINGULAR = 1e-3
"""Eigenvalues of Σ below this count as "extremely small" (PosMLP, Appendix .3, which leaves the limit open): along their axis the
Gaussian has a standard deviation of more than 32 patches, over twice the largest window of the published models."""


@dataclass(frozen=True)
class MixingLayer:
    """The gating unit of a layer and where it stands."""

    number: int  # from 1
    stage: int | None  # from 1; None: gMLP, which has none
    stride: int  # side of a token in pixels
    gate: GatingUnit

    @property
    def window(self) -> int:
        """Side of the window in tokens; N = window²."""
        return self.gate.mixing.window

    @property
    def label(self) -> str:
        return str(self.number) if self.stage is None else f"{self.number} (stage {self.stage})"

    @cached_property
    @torch.no_grad()
    def maps(self) -> Tensor:
        """(groups, N, N) float64 on the CPU: [group, query, key]."""
        return self.gate.mixing(None).detach().double().cpu()

    @torch.no_grad()
    def parts(self) -> dict[str, Tensor]:
        """Maps (N, N) float64 whose rows Fig. 7 draws, by their symbol: W, r and their sum where the map has both (Eq. 10); else
        the map of the first, the middle and the last group."""
        mixing = self.gate.mixing
        if not isinstance(mixing, GaussianMap) and mixing.weight is not None and mixing.table is not None:
            table = mixing.table[relative_index(self.window, mixing.table.device)][..., 0]  # (N, N)
            parts = {"W": mixing.weight, "r": table, "W + r": mixing.weight + table}
            return {name: part.double().cpu() for name, part in parts.items()}
        symbol = "A" if isinstance(mixing, GaussianMap) else "W" if mixing.table is None else "r"
        if len(self.maps) == 1:
            return {symbol: self.maps[0]}
        return {f"{symbol}, group {group + 1}": self.maps[group] for group in spread(len(self.maps), 3)}

    def query(self, patch: tuple[int, int] | None) -> tuple[int, int]:
        """(row, column) within its window of the token at the centre of a patch of 16 x 16 pixels; None: the window's centre."""
        if patch is None:
            return self.window // 2, self.window // 2
        row, column = (int((place + 0.5) * PATCH / self.stride) % self.window for place in patch)
        return row, column

    def index(self, patch: tuple[int, int] | None) -> int:
        """The number of that token, row by row."""
        row, column = self.query(patch)
        return row * self.window + column


def mixing_layers(model: GMLP | PosMLP) -> list[MixingLayer]:
    """The layers in order of execution."""
    if isinstance(model, GMLP):
        return [MixingLayer(number, None, PATCH, block.gate) for number, block in enumerate(model.blocks, start=1)]
    blocks = [(stage, block) for stage, of_stage in enumerate(model.stages, start=1) for block in of_stage.blocks]
    return [MixingLayer(i, stage, STEM_STRIDE * 2 ** (stage - 1), block.gate) for i, (stage, block) in enumerate(blocks, 1)]


def token_mixing_distance(mixing: Tensor, window: int) -> Tensor:
    """Distance from its query of what a token-mixing map sums, in patches, mean over queries: ConViT's D_loc (Eq. 8) of the shares
    |A_qk| / Σ_k |A_qk|.

    PosMLP defines no such number. The rows of ggqpe are a softmax, and the shares are the map itself. The other maps have no
    softmax and signed weights, with which they sum tokens of norm 1 (Eq. 9): their magnitude is their share. (..., N, N) -> (...)
    """
    shares = mixing.double().abs()
    shares = shares / shares.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    return mean_attention_distance(shares, query_key_distances(window, window, mixing.device))


def covariance_gain(covariance: Tensor) -> Tensor:
    """√(λ₁ λ₂) of each Σ: the term of a group in PosMLP's Eq. 16. The smaller it is, the less local the group.

    Despite its name Σ is what Eq. 5 writes as an inverse: 1 / √λ is the standard deviation along an axis in patches. Of
    ``covariance: free`` (Σ = Γ) it takes the symmetric part, which is all that the quadratic form depends on. Returns
    (..., 2, 2) -> (...) float64; NaN where the smaller eigenvalue is below :data:`SINGULAR`, which Eq. 16 leaves out. With
    ``free`` it may be negative: no Gaussian.
    """
    sigma = covariance.double()
    smaller, larger = torch.linalg.eigvalsh((sigma + sigma.transpose(-1, -2)) / 2).unbind(-1)
    return torch.where(smaller >= SINGULAR, smaller * larger, torch.nan).sqrt()


def spread(count: int, chosen: int) -> list[int]:
    """At most ``chosen`` of ``count`` numbers from 0, evenly spread, with the first and the last."""
    return sorted({round(i * (count - 1) / max(min(chosen, count) - 1, 1)) for i in range(min(chosen, count))})


_DIGITS = 6  # significant, of maps in analysis.json, which have thousands of numbers
_NO_FIGURE = "PosMLP has no such figure; the measure is that of ConViT, Fig. 5"


class GatedMLPChapter(Chapter):
    """Token-mixing maps (PosMLP, Fig. 1d-e, 4), bias maps (Fig. 5), rows of the maps (Fig. 7), g(Σ) (Fig. 8)."""

    model: GMLP | PosMLP
    models = (GMLP, PosMLP)

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._layers = mixing_layers(self.model)
        self._stages = [layer.stage for layer in self._layers]
        self._mixing = self.model.switches.mixing
        self._signed = self._mixing != "ggqpe"

    def measure(self, findings: Findings) -> None:
        findings.measure("token_mixing_layers.stage", self._stages, "[layer], from 1; null: gMLP")
        findings.measure("token_mixing_layers.window", [layer.window for layer in self._layers], "[layer], side in tokens")

    def lacks(self, name: str) -> str | None:
        if name == "bias_maps" and all(layer.gate.bias is None for layer in self._layers):
            return "The model has no bias after token mixing (model.switches.token_bias: false)."
        if name == "covariance_gain" and self._signed:
            return f"Σ is that of the Gaussian maps of ggqpe, and model.switches.mixing is {self._mixing}."
        return None

    @figure("token_mixing_maps", "Token-mixing maps of a query", "PosMLP, Fig. 1d, 1e and 4")
    def _maps(self, findings: Findings) -> Plot:
        single = max(len(layer.maps) for layer in self._layers) == 1
        shown = self._some(len(self._layers) if single else 8)
        groups = [spread(len(layer.maps), 8) for layer in shown]
        rows = [layer.maps[chosen, layer.index(self.request.query)] for layer, chosen in zip(shown, groups)]  # (chosen, N) each
        maps = [of_layer.unflatten(-1, (layer.window, layer.window)) for layer, of_layer in zip(shown, rows)]
        numbers = [[i + 1 for i in chosen] for chosen in groups]
        queries = [layer.query(self.request.query) for layer in shown]
        findings.measure("token_mixing_maps.layers", [layer.number for layer in shown], "[shown layer], from 1")
        findings.measure("token_mixing_maps.groups", numbers, "[shown layer][shown group], from 1")
        findings.measure("token_mixing_maps.queries", queries, "[shown layer][row, column of the query in the window]")
        findings.measure("token_mixing_maps.weights", maps, "[shown layer][shown group][row][column of the key]", _DIGITS)
        return Plot(
            "Weights with which the tokens of a window are summed into the framed query, by layer and channel group "
            f"(model.switches.mixing: {self._mixing}). Each map is divided by its largest {'magnitude' if self._signed else 'weight'}, so "
            f"that colours show shape and not size. {self._windows()}",
            partial(self._mixing_maps, shown, maps, numbers, queries),
        )

    def _some(self, count: int) -> list[MixingLayer]:
        return [self._layers[i] for i in spread(len(self._layers), count)]

    def _mixing_maps(self, shown: list[MixingLayer], maps: list[Tensor], groups: list[list[int]], queries: list) -> Figure:
        """PosMLP, Fig. 4: a row per layer, a column per channel group; with one group, layer after layer (Fig. 1d)."""
        label = f"weight / largest {'magnitude' if self._signed else 'weight'}"
        drawing: dict[str, Any] = {"limits": (-1.0, 1.0), "colors": DIVERGING} if self._signed else {"limits": (0.0, 1.0)}
        labels = [layer.label for layer in shown]
        shares = [of_layer / of_layer.abs().amax((1, 2), keepdim=True).clamp_min(1e-300) for of_layer in maps]
        if max(map(len, maps)) == 1:
            titles = [f"layer {layer}" for layer in labels]
            return _layer_maps([of_layer[0] for of_layer in shares], titles, label, queries, **drawing)
        names = [[str(group) for group in of_layer] for of_layer in groups]
        if all(of_layer == names[0] for of_layer in names):
            drawing |= {"columns": names[0], "xlabel": "Channel group"}
        else:
            drawing |= {"notes": names, "xlabel": "Channel groups, evenly chosen"}
        marked = [[query] * len(of_layer) for query, of_layer in zip(queries, maps)]
        return map_figure(shares, label, marked, rows=labels, ylabel="Layer", **drawing)

    def _windows(self) -> str:
        if isinstance(self.model, GMLP):
            return "The window is the whole image, in patches of 16 pixels."
        windows = list(dict.fromkeys((layer.stage, layer.window) for layer in self._layers))
        sides = ", ".join(f"{side} x {side}" for _, side in windows)
        return f"The windows of stages 1 to 4 have {sides} tokens, of 4, 8, 16 and 32 pixels; a window of fewer tokens is drawn as large as the others."

    @figure("token_mixing_distance", "Distance that token mixing bridges", _NO_FIGURE)
    def _distances(self, findings: Findings) -> Plot:
        distances = [token_mixing_distance(layer.maps, layer.window) for layer in self._layers]
        uniform = [token_mixing_distance(torch.ones_like(layer.maps[0]), layer.window).item() for layer in self._layers]
        findings.measure("token_mixing_distance", distances, "[layer][group], patches of the layer")
        findings.measure("token_mixing_distance_uniform", uniform, "[layer], patches of the layer: of equal weights")
        return Plot(
            "Mean distance between a query and the tokens that the map sums into it, by the magnitude of their weights (ConViT's "
            "Eq. 8, of the map with rows that sum to 1). One point per channel group, in patches of the layer's stage; the dashed "
            "line is a map of equal weights.",
            partial(self._per_group, distances, "mean distance, patches", dashed=("equal weights", uniform)),
        )

    def _per_group(self, values: Sequence[Tensor], ylabel: str, **drawing: Any) -> Figure:
        return layer_plot(values, ylabel, part="group", points=True, stages=self._stages, ylim=(0, None), **drawing)

    @figure("token_mixing_rows", "Token-mixing maps as matrices, and a row of them", "PosMLP, Fig. 7")
    def _rows(self, findings: Findings) -> Plot:
        shown = self._some(4)
        parts = [layer.parts() for layer in shown]
        rows = [layer.index(self.request.query) for layer in shown]
        weights = [{name: part[row] for name, part in of_layer.items()} for of_layer, row in zip(parts, rows)]
        findings.measure("token_mixing_rows.layers", [layer.number for layer in shown], "[shown layer], from 1")
        findings.measure("token_mixing_rows.rows", rows, "[shown layer], index of the query, from 0, row by row of the window")
        findings.measure("token_mixing_rows.weights", weights, "[shown layer]{map}[key]", _DIGITS)
        return Plot(
            "Queries down, keys across, both row by row of the window; at the right, the marked row (the query of the maps above) "
            "as a curve over the keys. W has a weight for each pair of tokens and r for each relative position, which repeats along "
            "the diagonals. The paper draws row 40.",
            partial(self._mixing_rows, shown, rows, parts),
        )

    def _mixing_rows(self, shown: list[MixingLayer], rows: list[int], parts: list[dict[str, Tensor]]) -> Figure:
        """PosMLP, Fig. 7: per layer the maps (N, N) by their symbols as matrices, as many in each, and one of their rows as curves."""
        columns = len(parts[0])
        figure = new_figure(2.0 * columns + 4.2, 1.9 * len(parts) + 0.3)
        grid = figure.subplots(len(parts), columns + 1, squeeze=False, width_ratios=[1.0] * columns + [1.9])
        for (*matrices, curves), of_layer, row, layer in zip(grid, parts, rows, shown):
            largest = max(float(part.abs().max()) for part in of_layer.values()) or 1e-12
            colors: dict[str, Any] = {"cmap": DIVERGING, "vmin": -largest} if self._signed else {"cmap": ATTENTION, "vmin": 0.0}
            for axes, (name, matrix), color in zip(matrices, of_layer.items(), COLOURS, strict=False):
                image = axes.imshow(matrix.numpy(), interpolation="nearest", **colors, vmax=largest)
                axes.axhline(row, color="black" if self._signed else RED, linewidth=0.6)
                axes.set_title(name, fontsize=8)
                axes.set(xticks=[0, len(matrix) - 1], yticks=[0, row, len(matrix) - 1])
                curves.plot(matrix[row].numpy(), color=color, linewidth=1.0, label=name)
            matrices[0].set_ylabel(f"Layer {layer.label}", fontsize=8)
            bar = figure.colorbar(image, ax=matrices, fraction=0.025, pad=0.01, aspect=18)
            bar.ax.tick_params(labelsize=7)
            bar.ax.locator_params(axis="y", nbins=4)
            for axes in (bar.ax, curves):
                axes.ticklabel_format(axis="y", scilimits=(-2, 3))
            curves.grid()
            curves.set_title(f"row {row}", fontsize=8)
            if columns > 1:
                legend_beside(curves, fontsize=7)
        for axes in grid[-1]:
            axes.set_xlabel("key", fontsize=8)
        return figure

    @figure("bias_maps", "Bias of every token", "PosMLP, Fig. 5")
    def _biases(self, findings: Findings) -> Plot:
        flat = [(layer.gate.bias, layer.window) for layer in self._layers if layer.gate.bias is not None]
        biases = [bias.detach().double().cpu().reshape(window, window) for bias, window in flat]
        findings.measure("token_bias", biases, "[layer][row][column], b of Eq. 15 (gMLP: Eq. 1)")
        return Plot(
            "The scalar that is added to each token of a window after mixing. Colours show the difference from the layer's mean in "
            "standard deviations; both figures are above each map. PosMLP's windows of a stage share it.",
            partial(_bias_maps, biases, [layer.label for layer in self._layers]),
        )

    @figure("covariance_gain", "Locality of the Gaussians: g(Σ)", "PosMLP, Fig. 8")
    def _covariance(self, findings: Findings) -> Plot:
        gaussians = [layer.gate.mixing for layer in self._layers if isinstance(layer.gate.mixing, GaussianMap)]
        gains = [covariance_gain(gaussian.covariance().detach().cpu()) for gaussian in gaussians]
        left_out = [int(gain.isnan().sum()) for gain in gains]
        centers = [gaussian.centers.detach().double().cpu() * torch.tensor([1.0, -1.0]) for gaussian in gaussians]
        findings.measure("covariance_gain", gains, "[layer][group], 1/patches²; null: left out")
        findings.measure("covariance_gain_mean", [gain.nanmean() for gain in gains], "[layer], 1/patches²: g(Σ) of Eq. 16")
        findings.measure("covariance_left_out", left_out, f"[layer], groups with an eigenvalue below {SINGULAR:g}")
        findings.measure("token_mixing_centers", centers, "[layer][group][right, down], patches: Δ of Eq. 5, from the query")
        forms = {"semidefinite": "ΓΓᵀ", "free": "Γ, of which this is the symmetric part", "isotropic": "αI"}
        form = forms[gaussians[0].covariance_form]
        return Plot(
            f"Square root of the product of Σ's eigenvalues, one point per channel group, and their mean g(Σ) (Eq. 16); Σ = {form}. "
            f"Small values: a wide Gaussian, non-local. {sum(left_out)} of {sum(map(len, gains))} groups with an eigenvalue below "
            f"{SINGULAR:g}, which are all but constant along an axis, are left out, as in the paper.",
            partial(self._per_group, gains, "g(Σ), 1/patches²"),
        )


def _bias_maps(biases: Sequence[Tensor], labels: Sequence[str]) -> Figure:
    """PosMLP, Fig. 5: the bias of each token, a map (window, window) per layer."""
    titles, maps = [], []
    for bias, label in zip(biases, labels):
        mean, deviation = float(bias.mean()), float(bias.std(correction=0))
        maps.append((bias - mean) / deviation if deviation > 1e-12 * max(abs(mean), 1.0) else bias * 0)
        titles.append(f"layer {label}\n{mean:.2g} ± {deviation:.1g}")
    return _layer_maps(maps, titles, "(bias - mean) / deviation", limits=(-2.5, 2.5), colors=DIVERGING)


def _layer_maps(
    maps: Sequence[Tensor], titles: Sequence[str], label: str, queries: Sequence[tuple[int, int]] = (), **drawing: Any
) -> Figure:
    """A map (side, side) per layer, one after another; sides may differ."""
    across = 6 if len(maps) <= 12 else 8 if len(maps) <= 24 else 10

    def in_rows(values: Sequence) -> list[Sequence]:
        return [values[first : first + across] for first in range(0, len(values), across)]

    return map_figure(in_rows(maps), label, in_rows(queries) or None, notes=in_rows(titles), xlabel="", cell=1.1, **drawing)
