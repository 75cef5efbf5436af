"""Token mixing of gMLP and PosMLP (Wang et al., "PosMLP", ACM MM 2022): maps, biases and the covariance of the Gaussians.

All of it is a function of the weights; no image is needed. A map mixes the tokens of a window: with PosMLP the windows of a stage
share it, and a token of stage i is a patch of 4 · 2^(i-1) pixels. With shifted windows, a window that is cut by the image's border
has the same map without the pairs that the border separates.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pipeline.analysis.chapter import Chapter, Drawn, Findings, Request, figure
from pipeline.analysis.chapters import gated_mlp_figures as figures
from pipeline.analysis.measures import finite, mean_attention_distance, query_key_distances
from pipeline.errors import UserError
from pipeline.models.common.base import VisionModel
from pipeline.models.common.layers import relative_index
from pipeline.models.gated_mlp.gating import GatingUnit
from pipeline.models.gated_mlp.gmlp import GMLP, PATCH
from pipeline.models.gated_mlp.posmlp import PosMLP
from pipeline.models.gated_mlp.posmlp_layers import STEM_STRIDE
from pipeline.models.gated_mlp.token_mixing import GaussianMap

SINGULAR = 1e-3
"""Eigenvalues of Σ below this count as "extremely small" (PosMLP, Appendix .3, which leaves the limit open): along their axis the
Gaussian has a standard deviation of more than 32 patches, over twice the largest window of the published models."""


@dataclass(frozen=True)
class MixingLayer:
    """The gating unit of a layer and where it stands.

    Attributes:
        stage: from 1; None: gMLP, which has none.
        stride: side of a token in pixels.
        gate: its gating unit.
    """

    stage: int | None
    stride: int
    gate: GatingUnit

    @property
    def window(self) -> int:
        """Side of the window in tokens; N = window²."""
        return self.gate.mixing.window

    @torch.no_grad()
    def map(self) -> Tensor:
        """(groups, N, N) float64 on the CPU: [group, query, key]."""
        return self.gate.mixing(None).detach().double().cpu()

    @torch.no_grad()
    def parts(self) -> dict[str, Tensor]:
        """Maps (N, N) float64 whose rows Fig. 7 draws, by their symbol: W, r and their sum where the map has both (Eq. 10); else
        the map of the first, the middle and the last group."""
        mixing = self.gate.mixing
        if not isinstance(mixing, GaussianMap) and mixing.weight is not None and mixing.table is not None:
            table = mixing.table[relative_index(self.window, mixing.table.device)][..., 0]  # (N, N)
            return {
                name: each.double().cpu()
                for name, each in {"W": mixing.weight, "r": table, "W + r": mixing.weight + table}.items()
            }
        maps = self.map()
        symbol = "A" if isinstance(mixing, GaussianMap) else "W" if mixing.table is None else "r"
        if len(maps) == 1:
            return {symbol: maps[0]}
        return {f"{symbol}, group {group + 1}": maps[group] for group in spread(len(maps), 3)}

    def query(self, patch: tuple[int, int] | None, image_size: int) -> tuple[int, int]:
        """(row, column) within its window of the token at the centre of a patch.

        Args:
            patch: (row, column) of a patch of 16 x 16 pixels; None: the window's centre.
            image_size: side of the image in pixels.

        Raises:
            UserError: the patch is outside of the image.
        """
        if patch is None:
            return self.window // 2, self.window // 2
        patches = image_size // PATCH
        if not all(0 <= each < patches for each in patch):
            raise UserError(
                f"--query is {patch[0]},{patch[1]}, but at {image_size} pixels there are {patches} x {patches} patches of {PATCH} pixels",
                f"pass a row and a column from 0 to {patches - 1}",
            )
        row, column = (int((each + 0.5) * PATCH / self.stride) % self.window for each in patch)
        return row, column


def mixing_layers(model: GMLP | PosMLP) -> list[MixingLayer]:
    """The layers in order of execution."""
    if isinstance(model, GMLP):
        return [MixingLayer(None, PATCH, block.gate) for block in model.blocks]
    return [
        MixingLayer(number, STEM_STRIDE * 2 ** (number - 1), block.gate)
        for number, stage in enumerate(model.stages, start=1)
        for block in stage.blocks
    ]


def token_mixing_distance(mixing: Tensor, window: int) -> Tensor:
    """Distance from its query of what a token-mixing map sums, in patches, mean over queries: ConViT's D_loc (Eq. 8) of the shares
    |A_qk| / Σ_k |A_qk|.

    PosMLP defines no such number. The rows of ggqpe are a softmax, and the shares are the map itself. The other maps have no
    softmax and signed weights, with which they sum tokens of norm 1 (Eq. 9): their magnitude is their share.

    Args:
        mixing: (..., N, N).
        window: side of the window; N = window².

    Returns:
        (...) float64.
    """
    shares = mixing.double().abs()
    shares = shares / shares.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    return mean_attention_distance(shares, query_key_distances(window, window, mixing.device))


def covariance_gain(covariance: Tensor) -> Tensor:
    """√(λ₁ λ₂) of each Σ: the term of a group in PosMLP's Eq. 16. The smaller it is, the less local the group.

    Despite its name Σ is what Eq. 5 writes as an inverse: 1 / √λ is the standard deviation along an axis in patches. Of
    ``covariance: free`` (Σ = Γ) it takes the symmetric part, which is all that the quadratic form depends on.

    Args:
        covariance: (..., 2, 2).

    Returns:
        (...) float64; NaN where the smaller eigenvalue is below :data:`SINGULAR`, which Eq. 16 leaves out. With ``free`` it may be
        negative: no Gaussian.
    """
    sigma = covariance.double()
    smaller, larger = torch.linalg.eigvalsh((sigma + sigma.transpose(-1, -2)) / 2).unbind(-1)
    return torch.where(smaller >= SINGULAR, smaller * larger, torch.nan).sqrt()


def spread(count: int, chosen: int) -> list[int]:
    """At most ``chosen`` of ``count`` numbers from 0, evenly spread, with the first and the last."""
    return sorted({round(i * (count - 1) / max(min(chosen, count) - 1, 1)) for i in range(min(chosen, count))})


class GatedMLPChapter(Chapter):
    """Token-mixing maps (PosMLP, Fig. 1d-e, 4), bias maps (Fig. 5), rows of the maps (Fig. 7), g(Σ) (Fig. 8)."""

    model: GMLP | PosMLP

    @classmethod
    def applies(cls, model: VisionModel) -> bool:
        return isinstance(model, GMLP | PosMLP)

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._layers = mixing_layers(self.model)
        self._stages = [layer.stage for layer in self._layers]
        self._labels = [str(i) if stage is None else f"{i} (stage {stage})" for i, stage in enumerate(self._stages, start=1)]
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
    def _maps(self, findings: Findings) -> Drawn:
        single = max(len(layer.map()) for layer in self._layers) == 1
        shown = spread(len(self._layers), len(self._layers) if single else 8)
        queries, maps, groups = [], [], []
        for layer in (self._layers[i] for i in shown):
            window, all_groups = layer.window, layer.map()
            row, column = layer.query(self.request.query, self.request.image_size)
            chosen = spread(len(all_groups), 8)
            queries.append((row, column))
            groups.append(chosen)
            maps.append(all_groups[chosen, row * window + column].unflatten(-1, (window, window)))  # (chosen, window, window)
        numbered = [[i + 1 for i in chosen] for chosen in groups]
        for name, value, unit in (
            ("layers", [i + 1 for i in shown], "[shown layer], from 1"),
            ("groups", numbered, "[shown layer][shown group], from 1"),
            ("queries", queries, "[shown layer][row, column of the query in the window]"),
            ("weights", [_rounded(of_layer) for of_layer in maps], "[shown layer][shown group][row][column of the key]"),
        ):
            findings.measure(f"token_mixing_maps.{name}", value, unit)
        return Drawn(
            "Weights with which the tokens of a window are summed into the framed query, by layer and channel group "
            f"(model.switches.mixing: {self._mixing}). Each map is divided by its largest {'magnitude' if self._signed else 'weight'}, so "
            f"that colours show shape and not size. {self._windows()}",
            partial(figures.mixing_maps, maps, queries, [self._labels[i] for i in shown], groups, self._signed),
        )

    def _windows(self) -> str:
        if isinstance(self.model, GMLP):
            return "The window is the whole image, in patches of 16 pixels."
        windows = list(dict.fromkeys((layer.stage, layer.window) for layer in self._layers))
        sides = ", ".join(f"{side} x {side}" for _, side in windows)
        return f"The windows of stages 1 to 4 have {sides} tokens, of 4, 8, 16 and 32 pixels; a window of fewer tokens is drawn as large as the others."

    @figure(
        "token_mixing_distance",
        "Distance that token mixing bridges",
        "PosMLP has no such figure; the measure is that of ConViT, Fig. 5",
    )
    def _distances(self, findings: Findings) -> Drawn:
        distances = [token_mixing_distance(layer.map(), layer.window) for layer in self._layers]
        uniform = [
            token_mixing_distance(torch.ones(layer.window**2, layer.window**2), layer.window).item() for layer in self._layers
        ]
        findings.measure("token_mixing_distance", [each.tolist() for each in distances], "[layer][group], patches of the layer")
        findings.measure("token_mixing_distance_uniform", uniform, "[layer], patches of the layer: of equal weights")
        return Drawn(
            "Mean distance between a query and the tokens that the map sums into it, by the magnitude of their weights (ConViT's "
            "Eq. 8, of the map with rows that sum to 1). One point per channel group, in patches of the layer's stage; the dashed "
            "line is a map of equal weights.",
            partial(figures.per_group, distances, "mean distance, patches", self._stages, reference=uniform),
        )

    @figure("token_mixing_rows", "Token-mixing maps as matrices, and a row of them", "PosMLP, Fig. 7")
    def _rows(self, findings: Findings) -> Drawn:
        shown = spread(len(self._layers), 4)
        parts = [self._layers[i].parts() for i in shown]
        rows = []
        for layer in (self._layers[i] for i in shown):
            row, column = layer.query(self.request.query, self.request.image_size)
            rows.append(row * layer.window + column)
        weights = [{name: _rounded(part[row]) for name, part in of_layer.items()} for of_layer, row in zip(parts, rows)]
        findings.measure("token_mixing_rows.layers", [i + 1 for i in shown], "[shown layer], from 1")
        findings.measure("token_mixing_rows.rows", rows, "[shown layer], index of the query, from 0, row by row of the window")
        findings.measure("token_mixing_rows.weights", weights, "[shown layer]{map}[key]")
        return Drawn(
            "Queries down, keys across, both row by row of the window; at the right, the marked row (the query of the maps above) "
            "as a curve over the keys. W has a weight for each pair of tokens and r for each relative position, which repeats along "
            "the diagonals. The paper draws row 40.",
            partial(figures.mixing_rows, parts, rows, [self._labels[i] for i in shown], self._signed),
        )

    @figure("bias_maps", "Bias of every token", "PosMLP, Fig. 5")
    def _biases(self, findings: Findings) -> Drawn:
        biases = [
            layer.gate.bias.detach().double().cpu().flatten().unflatten(0, (layer.window, layer.window))
            for layer in self._layers
            if layer.gate.bias is not None
        ]
        findings.measure("token_bias", [each.tolist() for each in biases], "[layer][row][column], b of Eq. 15 (gMLP: Eq. 1)")
        return Drawn(
            "The scalar that is added to each token of a window after mixing. Colours show the difference from the layer's mean in "
            "standard deviations; both figures are above each map. PosMLP's windows of a stage share it.",
            partial(figures.bias_maps, biases, self._labels),
        )

    @figure("covariance_gain", "Locality of the Gaussians: g(Σ)", "PosMLP, Fig. 8")
    def _covariance(self, findings: Findings) -> Drawn:
        gaussians = [layer.gate.mixing for layer in self._layers if isinstance(layer.gate.mixing, GaussianMap)]
        gains = [covariance_gain(gaussian.covariance().detach().cpu()) for gaussian in gaussians]
        left_out = [int(gain.isnan().sum()) for gain in gains]
        centers = [(each.centers.detach().double().cpu() * torch.tensor([1.0, -1.0])).tolist() for each in gaussians]
        for name, value, unit in (
            ("covariance_gain", [finite(gain) for gain in gains], "[layer][group], 1/patches²; null: left out"),
            ("covariance_gain_mean", [finite(gain.nanmean()) for gain in gains], "[layer], 1/patches²: g(Σ) of Eq. 16"),
            ("covariance_left_out", left_out, f"[layer], groups with an eigenvalue below {SINGULAR:g}"),
            ("token_mixing_centers", centers, "[layer][group][right, down], patches: Δ of Eq. 5, from the query"),
        ):
            findings.measure(name, value, unit)
        form = {"semidefinite": "ΓΓᵀ", "free": "Γ, of which this is the symmetric part", "isotropic": "αI"}[
            gaussians[0].covariance_form
        ]
        return Drawn(
            f"Square root of the product of Σ's eigenvalues, one point per channel group, and their mean g(Σ) (Eq. 16); Σ = {form}. "
            f"Small values: a wide Gaussian, non-local. {sum(left_out)} of {sum(map(len, gains))} groups with an eigenvalue below "
            f"{SINGULAR:g}, which are all but constant along an axis, are left out, as in the paper.",
            partial(figures.per_group, gains, "g(Σ), 1/patches²", self._stages),
        )


def _rounded(values: Tensor) -> list:
    """Lists with six significant decimals: a map has thousands of numbers."""
    scale = float(values.abs().max()) or 1.0
    decimals = 6 - int(torch.tensor(scale).log10().floor())
    return values.round(decimals=decimals).tolist()
