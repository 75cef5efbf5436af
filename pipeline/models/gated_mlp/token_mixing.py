"""Token-mixing maps of gMLP and PosMLP (Wang et al., "PosMLP", ACM MM 2022, Sec. 3 and 4.1).

A map A[group, query, key] holds the weights with which the tokens of a window (keys) are summed into each token (query). It
depends on parameters only, not on the image, and is computed once per layer and forward pass.
:class:`LearnedMap` has a weight per pair of tokens, per relative position, or the sum of both;
:class:`GaussianMap` is a Gaussian of the relative position with six parameters per group.
"""

from typing import Literal, cast

import torch
from torch import Tensor, nn

from pipeline.models.common.layers import as_written, constant_table, key_offsets
from pipeline.models.common.probe import probe
from pipeline.models.common.windows import Runs, relative_index

Covariance = Literal["isotropic", "free", "semidefinite"]
# Initialization, as in the published code.
POSITION_STD = 0.01  # GQPE: of the noise around centre 0 and spread 1
TABLE_STD = 0.02  # LRPE
TOKEN_WEIGHT_STD = 1e-6  # SGU: near zero, so that the gate is initially its bias


@constant_table
def quadratic_terms(window: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """r of Eq. 8: relative positions of all pairs with their quadratic terms.

    As in the published code, the two axes have opposite signs: dx = x_key - x_query, dy = y_query - y_key. Returns (N, N, 5):
    [query, key] = (dx, dy, dx², dy², dx dy), N = window², tokens in row-major order.
    """
    down, dx = key_offsets(window, window, device)
    dy = -down
    return torch.stack([dx, dy, dx * dx, dy * dy, dx * dy], dim=-1).to(dtype)


class LearnedMap(nn.Module):
    """W (Eq. 1, SGU), r (Eq. 11, LRPE) or W + r (Eq. 10, LRPE-M), not normalized. Probe: ``position``, the map.

    Args:
        window: side of the window; N = window² tokens.
        groups: channel groups with a table each (GLRPE); W is shared by all groups.
        token_weights: learn W, a weight per pair of tokens.
        relative_table: learn r, a weight per relative position.

    ``forward``: connected (windows, N, N) bool, the pairs that may mix in each window, or None for all -> (groups, N, N), or
    (windows, groups, N, N) with ``connected``; 0 for pairs that may not mix.
    """

    def __init__(self, window: int, groups: int, token_weights: bool, relative_table: bool) -> None:
        super().__init__()
        self.window = window
        self.weight = nn.Parameter(torch.empty(window**2, window**2)) if token_weights else None  # (N, N)
        self.table = nn.Parameter(torch.empty((2 * window - 1) ** 2, groups)) if relative_table else None
        if self.weight is not None:
            nn.init.trunc_normal_(self.weight, std=TOKEN_WEIGHT_STD)
        if self.table is not None:
            nn.init.trunc_normal_(self.table, std=TABLE_STD)

    def forward(self, connected: Tensor | None = None) -> Tensor:
        parts: list[Tensor] = []
        if self.weight is not None:
            parts.append(self.weight[None])  # (1, N, N)
        if self.table is not None:
            parts.append(self.table[relative_index(self.window, self.table.device)].permute(2, 0, 1))  # (groups, N, N)
        mixing = cast(Tensor, sum(parts))  # a sum of no parts would be 0; with one part it is a copy
        if connected is not None:
            mixing = mixing * connected[:, None]  # (windows, groups, N, N)
        probe("position", lambda: mixing)
        return mixing


class GaussianMap(nn.Module):
    """Softmax over the keys of a quadratic form: a Gaussian centred at an offset from the query (GGQPE, Eq. 5 to 8 and 13).

    Probes: ``position``, the map; ``covariance`` (groups, 2, 2), the matrix of the quadratic form. As in the published code,
    Table 6 and Figure 8, Σ = ΓΓᵀ denotes what Eq. 5 writes as an inverse: large values make the map local.

    Args:
        groups: channel groups with a Gaussian each.
        covariance: the form of Σ (Table 6). ``semidefinite``: ΓΓᵀ. ``free``: Γ. ``isotropic``: αI with α = spread², which
            scales the whole form as in the paper (the published code does not scale its quadratic term).
        learned_centers: learn Δ, the offset from the query at which the Gaussian peaks; false: Δ = 0.

    ``forward``: as :class:`LearnedMap`; rows sum to 1.
    """

    def __init__(self, window: int, groups: int, covariance: Covariance, learned_centers: bool) -> None:
        super().__init__()
        self.window, self.covariance_form = window, covariance
        unit = torch.ones(groups) if covariance == "isotropic" else torch.eye(2).repeat(groups, 1, 1)
        self.spreads = nn.Parameter(unit + POSITION_STD * torch.randn_like(unit))  # (groups,) or (groups, 2, 2)
        if learned_centers:
            self.centers = nn.Parameter(POSITION_STD * torch.randn(groups, 2))
        else:
            self.register_buffer("centers", torch.zeros(groups, 2), persistent=False)

    def covariance(self) -> Tensor:
        """Σ: (groups, 2, 2)."""
        if self.covariance_form == "isotropic":
            return self.spreads[:, None, None] ** 2 * torch.eye(2, device=self.spreads.device, dtype=self.spreads.dtype)
        if self.covariance_form == "free":
            return self.spreads
        return self.spreads @ self.spreads.transpose(1, 2)

    def forward(self, connected: Tensor | None = None) -> Tensor:
        # In full precision even under autocast: the map is small, and its rounding error would affect every token.
        with as_written(self.spreads):
            sigma = self.covariance()  # (groups, 2, 2)
            probe("covariance", lambda: sigma)
            peak = (sigma @ self.centers[:, :, None])[:, :, 0]  # (groups, 2)
            squares = torch.stack([sigma[:, 0, 0], sigma[:, 1, 1], sigma[:, 0, 1] + sigma[:, 1, 0]], dim=-1)  # (groups, 3)
            v = torch.cat([peak, -0.5 * squares], dim=-1)  # (groups, 5), Eq. 7
            terms = quadratic_terms(self.window, v.device, v.dtype)  # (N, N, 5)
            logits = torch.einsum("qkf,gf->gqk", terms, v)  # (groups, N, N), Eq. 6
            if connected is not None:
                logits = logits.masked_fill(~connected[:, None], -torch.inf)  # (windows, groups, N, N)
            mixing = logits.softmax(dim=-1)
        probe("position", lambda: mixing)
        return mixing


def mix_tokens(mixing: Tensor, x: Tensor) -> Tensor:
    """Replace each token by the map's weighted sum over the tokens of its window: mixing (groups, N, N), the same for all windows,
    or (windows, groups, N, N), x (B, windows, N, width) -> the same shape. Channel c belongs to group c mod groups."""
    grouped = x.unflatten(-1, (-1, mixing.shape[-3]))  # (B, windows, N, width / groups, groups)
    equation = "gqk,bwkcg->bwqcg" if mixing.ndim == 3 else "wgqk,bwkcg->bwqcg"
    return torch.einsum(equation, mixing, grouped).flatten(-2)


def mix_tokens_by_kind(mixing: Tensor, x: Tensor, runs: Runs) -> Tensor:
    """:func:`mix_tokens` with a map for each kind of window: (kinds, groups, N, N), kinds in row-major order of the runs."""
    kinds = iter(mixing.unbind(0))  # (groups, N, N) each
    bands = []
    for band in x.unflatten(1, (sum(runs.rows), sum(runs.columns))).split(runs.rows, dim=1):
        parts = [
            mix_tokens(next(kinds), part.flatten(1, 2)).view_as(part)  # (B, rows of the run, columns of the run, N, width)
            for part in band.split(runs.columns, dim=2)
        ]
        bands.append(torch.cat(parts, dim=2))
    return torch.cat(bands, dim=1).flatten(1, 2)
