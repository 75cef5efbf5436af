"""The gated block of gMLP and PosMLP, which mixes both tokens and channels (Wang et al., "PosMLP", ACM MM 2022, Sec. 3.1, 4.1).

LayerNorm, Linear, GELU, gating unit, Linear, residual. The gating unit splits the channels into two halves, mixes the tokens of
one half and multiplies the result with the other. The block replaces both attention and MLP of a transformer.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.errors import UserError
from pipeline.models.common.base import Switches, VisionModel, scale_branch
from pipeline.models.common.layers import NORM_EPS, drop_elements
from pipeline.models.common.windows import Runs, Tiling
from pipeline.models.gated_mlp.token_mixing import Covariance, GaussianMap, LearnedMap, mix_tokens, mix_tokens_by_kind

GROUPED = ("glrpe", "ggqpe")


class GatingSwitches(Switches):
    """Ablations of the gating unit. "PosMLP" is Wang et al., ACM MM 2022; its Table 1 has each map with both backbones."""

    mixing: Literal["sgu", "lrpe_m", "lrpe", "glrpe", "ggqpe"] = "ggqpe"
    """PosMLP Table 1, the token-mixing map. sgu: a weight per pair of tokens (gMLP); lrpe: a weight per relative position;
    lrpe_m: the sum of both; glrpe: lrpe per channel group; ggqpe: a Gaussian of the relative position per channel group."""
    covariance: Covariance = "semidefinite"
    """PosMLP Table 6, Σ of ggqpe. isotropic: αI; free: Γ; semidefinite: ΓΓᵀ."""
    learned_centers: bool = True
    """PosMLP Table 6, Δ of ggqpe. false: frozen at (0, 0), so that every Gaussian is centred on its query."""
    token_bias: bool = True
    """PosMLP Table 7: add a learned scalar per token after mixing (b of Eq. 15)."""
    norm: bool | None = None
    """PosMLP Figure 3d: LayerNorm before mixing. null: as in the equations, with every map except ggqpe."""
    combine: Literal["multiply", "add", "concatenate"] = "multiply"
    """PosMLP Figure 3a to c: how the mixed half and the other half are combined."""
    split: bool = True
    """PosMLP Figure 3e. false: all channels are mixed, and the result is multiplied with the unmixed input."""

    def misfits(self) -> Iterator[str]:
        if self.mixing != "ggqpe" and (self.covariance != "semidefinite" or not self.learned_centers):
            yield "must leave covariance and learned_centers alone unless mixing is 'ggqpe'"
        if getattr(self, "groups", None) and self.mixing not in GROUPED:  # a field of each family's own
            yield f"must leave groups alone unless mixing is one of {', '.join(GROUPED)}"

    @property
    def normalises(self) -> bool:
        return self.mixing != "ggqpe" if self.norm is None else self.norm


class GatingCode(NamedTuple):
    """Differences between the two published implementations: which half is mixed, and the epsilon of the norm before it."""

    mixes_first_half: bool
    norm_eps: float


POSMLP_CODE = GatingCode(mixes_first_half=True, norm_eps=1e-6)
GMLP_CODE = GatingCode(mixes_first_half=False, norm_eps=1e-5)  # timm's


class GatingUnit(nn.Module):
    """(A u + b) * v of the two channel halves u and v (SGU Eq. 1, PoSGU Eq. 10 to 15).

    Args:
        width: input channels; attribute ``out_width`` has the output's.
        window: side of the window; N = window² tokens.
        groups: channel groups of the map. UserError unless they divide the mixed channels.

    ``forward``: x (B, windows, N, width), connected and runs as :class:`GatedBlock` -> (B, windows, N, out_width).
    """

    def __init__(self, width: int, window: int, groups: int, switches: GatingSwitches, code: GatingCode) -> None:
        super().__init__()
        part = width // 2 if switches.split else width
        if part % groups:
            problem = f"model.switches.groups must divide the {part} mixed channels, got {groups}"
            raise UserError(problem, "set it to a power of two, for example 8")
        self.out_width = 2 * part if switches.combine == "concatenate" else part
        self.split, self.combine, self.mixes_first_half = switches.split, switches.combine, code.mixes_first_half
        self.norm = nn.LayerNorm(part, eps=code.norm_eps) if switches.normalises else nn.Identity()
        self.mixing: GaussianMap | LearnedMap
        if switches.mixing == "ggqpe":
            self.mixing = GaussianMap(window, groups, switches.covariance, switches.learned_centers)
        else:
            token_weights, relative_table = switches.mixing in ("sgu", "lrpe_m"), switches.mixing != "sgu"
            self.mixing = LearnedMap(window, groups, token_weights, relative_table)
        self.bias: nn.Parameter | None = None
        if switches.token_bias:
            # Shapes of the published weights. gMLP's bias of 1 initializes the gate as the identity.
            self.bias = nn.Parameter(torch.ones(window**2) if switches.mixing == "sgu" else torch.zeros(1, window**2, 1))

    def forward(self, x: Tensor, connected: Tensor | None, runs: Runs | None = None) -> Tensor:
        first, second = x.chunk(2, dim=-1) if self.split else (x, x)  # (B, windows, N, width / 2)
        u, v = (first, second) if self.mixes_first_half else (second, first)
        mixing, u = self.mixing(connected), self.norm(u)
        u = mix_tokens(mixing, u) if runs is None else mix_tokens_by_kind(mixing, u, runs)  # (B, windows, N, width / 2)
        if self.bias is not None:
            u = u + self.bias.view(-1, 1).to(u.dtype)
        if self.combine == "multiply":
            return u * v
        return u + v if self.combine == "add" else torch.cat([u, v], dim=-1)


class GatedBlock(nn.Module):
    """x + Linear(gate(GELU(Linear(LayerNorm(x))))).

    Args:
        width: channels of a token.
        ratio: the gating unit has ``ratio * width`` input channels.
        window, groups: see :class:`GatingUnit`.
        dropout: rate of the dropout on the branch in training (PosMLP's published code).

    ``forward``: x (B, windows, N, width) -> the same shape. ``branch_scales``: (B, 1) stochastic-depth factor of the branch; None: 1.
    ``connected``: (windows, N, N) bool, the pairs of tokens that may mix, or (kinds, N, N) for the kinds of windows in ``runs``;
    None: all. ``noise``: (B,) uniform numbers in [0, 1) that determine the dropout masks; None: no dropout.
    """

    def __init__(
        self, width: int, ratio: int, window: int, groups: int, switches: GatingSwitches, code: GatingCode, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.fc1 = nn.Linear(width, ratio * width)
        self.gate = GatingUnit(ratio * width, window, groups, switches, code)
        self.fc2 = nn.Linear(self.gate.out_width, width)

    def forward(
        self,
        x: Tensor,
        branch_scales: Tensor | None,
        connected: Tensor | None = None,
        noise: Tensor | None = None,
        runs: Runs | None = None,
    ) -> Tensor:
        branch = self.fc2(self.gate(F.gelu(self.fc1(self.norm(x))), connected, runs))
        if noise is not None:
            branch = drop_elements(branch, self.dropout, noise)
        return x + scale_branch(branch, branch_scales, 0)


def run_in_windows(
    model: VisionModel, block: GatedBlock, x: Tensor, tiling: Tiling, scales: Tensor | None, noise: Tensor | None = None
) -> Tensor:
    """Run a block of ``model`` in the windows of a grid: x (B, rows, columns, width) -> the same shape.

    In the feature form, whose grids have hundreds of windows, there is a map for each kind of window only.
    """
    connected, runs = tiling.connected_kinds(x.device) if model.strides else (tiling.connected(x.device), None)
    return tiling.join(model.run_block(block, tiling.split(x), scales, connected, noise, runs))
