"""Token-mixing maps are the papers' formulas, on windows that keep their places."""

from __future__ import annotations

import torch
from torch import nn

from pipeline.models.common.windows import Tiling
from pipeline.models.gated_mlp.token_mixing import GaussianMap, LearnedMap, mix_tokens


def test_the_gaussian_map_is_equation_5() -> None:
    """Guards against an expanded quadratic form that is not the Gaussian, and against a peak beside its centre."""
    torch.manual_seed(0)
    for form in ("isotropic", "free", "semidefinite"):
        position = GaussianMap(5, 3, form, learned_centers=True).double()
        nn.init.normal_(position.centers)
        spreads = position.spreads.detach()
        sigma = spreads[:, None, None] ** 2 * torch.eye(2) if form == "isotropic" else spreads
        sigma = spreads @ spreads.transpose(1, 2) if form == "semidefinite" else sigma
        if form == "free":  # the expansion of a form that is not symmetric is the authors'; Eq. 5 assumes symmetry
            sigma = (sigma + sigma.transpose(1, 2)) / 2
            with torch.no_grad():
                position.spreads.copy_(sigma)
        rows, columns = torch.arange(25) // 5, torch.arange(25) % 5
        offset = torch.stack([columns[None] - columns[:, None], rows[:, None] - rows[None]], dim=-1).double()  # (N, N, 2)
        delta = offset - position.centers.detach()[:, None, None]  # (groups, N, N, 2)
        expected = (-0.5 * torch.einsum("gqki,gij,gqkj->gqk", delta, sigma.double(), delta)).softmax(-1)
        torch.testing.assert_close(position().detach(), expected)


def test_a_relative_table_gives_equal_offsets_equal_weights() -> None:
    """Guards against an index that confuses rows with columns or mixes up groups."""
    torch.manual_seed(0)
    learned = LearnedMap(4, 2, token_weights=False, relative_table=True)
    mixing = learned().detach().unflatten(2, (4, 4)).unflatten(1, (4, 4))  # (groups, query y, x, key y, x)
    assert torch.equal(mixing[:, 0, 0, 1, 2], mixing[:, 2, 1, 3, 3]), "both one down and two to the right"
    assert mixing.flatten(1).unique(dim=1).shape[1] == 49, "one weight for each of 7 x 7 offsets"
    assert not torch.equal(mixing[0], mixing[1])


def test_groups_are_strided_over_the_channels() -> None:
    """Guards against groups of neighbouring channels: published weights know channel mod groups."""
    mixing = torch.stack([torch.eye(4), torch.zeros(4, 4), 2 * torch.eye(4)])  # (3 groups, N, N)
    x = torch.randn(2, 3, 4, 6)
    torch.testing.assert_close(mix_tokens(mixing, x), x * torch.tensor([1.0, 0.0, 2.0, 1.0, 0.0, 2.0]))
    torch.testing.assert_close(mix_tokens(mixing.expand(3, 3, 4, 4), x), mix_tokens(mixing, x))


def test_shifted_windows_never_mix_opposite_borders() -> None:
    """Guards against windows that lose their place, and against the last ones mixing what only the wrap made neighbours."""
    x = torch.arange(6 * 9).view(1, 6, 9, 1).float()
    for shift in (0, 1):
        tiling = Tiling((6, 9), 3, (shift, shift))
        assert torch.equal(tiling.join(tiling.split(x)), x)
    tokens = tiling.split(x)[0, :, :, 0]  # (windows, 9): each value tells its place
    rows, columns = tokens // 9, tokens % 9
    near = ((rows[:, :, None] - rows[:, None]).abs() < 3) & ((columns[:, :, None] - columns[:, None]).abs() < 3)
    connected = tiling.connected(x.device)
    assert torch.equal(connected, near) and not connected.all()
    for position in (GaussianMap(3, 2, "semidefinite", True), LearnedMap(3, 2, True, True)):
        mixing = position(connected)  # (windows, groups, N, N)
        assert (mixing[~connected[:, None].expand_as(mixing)] == 0).all()
        torch.testing.assert_close(mixing[0], position(), msg="an inner window is as without a shift")
