"""Measure the token mixing of gMLP and PosMLP: the map of each layer, the distance that it bridges, the covariance of its Gaussians."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pipeline.analysis.measures import mean_attention_distance, query_key_distances
from pipeline.models.common.windows import relative_index
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
    strides = [STEM_STRIDE * 2 ** (stage - 1) for stage, _ in blocks]
    return [MixingLayer(i, stage, stride, block.gate) for i, ((stage, block), stride) in enumerate(zip(blocks, strides), 1)]


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
