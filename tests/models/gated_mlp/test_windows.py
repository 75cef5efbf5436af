"""Windows on grids of any size, and PosMLP as a backbone on them (Wang et al., ACM MM 2022, Sec. 5.5)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipeline.models import create_model
from pipeline.models.common.base import as_features
from pipeline.models.common.probe import recorded
from pipeline.models.common.windows import Tiling
from pipeline.models.gated_mlp.posmlp import PosMLP
from pipeline.models.gated_mlp.token_mixing import GaussianMap, LearnedMap, mix_tokens, mix_tokens_by_kind

WINDOW = 4
GRIDS = [((8, 12), 0), ((8, 12), 2), ((5, 11), 0), ((5, 11), 2), ((3, 9), 2), ((13, 4), 2), ((2, 3), 0), ((6, 18), 1)]


def mixed(tiling: Tiling, mixing: GaussianMap | LearnedMap, x: Tensor) -> Tensor:
    """The tokens of a grid (1, rows, columns, width), mixed within their windows."""
    connected, runs = tiling.connected_kinds(x.device)
    weights, tokens = mixing(connected), tiling.split(x)
    return tiling.join(mix_tokens(weights, tokens) if runs is None else mix_tokens_by_kind(weights, tokens, runs))


def one_by_one(mixing: GaussianMap | LearnedMap, x: Tensor, shifts: tuple[int, int]) -> Tensor:
    """The same, token by token: keys are the tokens of the image in the query's window, weights those of their places in it."""
    weights, out = mixing(), torch.zeros_like(x)
    rows, columns = x.shape[1:3]
    places = [(row - shifts[0], column - shifts[1]) for row in range(rows) for column in range(columns)]
    windows = [(row // WINDOW, column // WINDOW) for row, column in places]
    inside = [row % WINDOW * WINDOW + column % WINDOW for row, column in places]
    tokens = x[0].flatten(0, 1)  # (rows * columns, width)
    for query, window in enumerate(windows):
        keys = [key for key, other in enumerate(windows) if other == window]
        row = weights[:, inside[query], [inside[key] for key in keys]]  # (groups, keys)
        if isinstance(mixing, GaussianMap):
            row = row / row.sum(-1, keepdim=True)
        values = tokens[keys].unflatten(-1, (-1, len(row)))  # (keys, width / groups, groups)
        out[0, query // columns, query % columns] = torch.einsum("gk,kcg->cg", row, values).flatten()
    return out


@pytest.mark.parametrize(("grid", "shift"), GRIDS)
@pytest.mark.parametrize("kind", ["gaussian", "learned"])
def test_tokens_mix_with_those_of_their_window_alone(grid: tuple[int, int], shift: int, kind: str) -> None:
    """Guards against tokens of the padding that take weight, windows that wrap around the image, and kinds of windows mixed up."""
    torch.manual_seed(0)
    mixing = GaussianMap(WINDOW, 2, "semidefinite", True) if kind == "gaussian" else LearnedMap(WINDOW, 2, True, True)
    for parameter in mixing.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(1, *grid, 6, dtype=torch.float64)
    rows, columns = (shift if size > WINDOW else 0 for size in grid)
    tiling = Tiling(grid, WINDOW, (rows, columns))
    with torch.no_grad():
        found = mixed(tiling, mixing.double(), x)
        torch.testing.assert_close(found, one_by_one(mixing, x, tiling.shifts))
        weights = mixing(tiling.connected(x.device))  # of each window, as the classifier does it
        torch.testing.assert_close(found, tiling.join(mix_tokens(weights, tiling.split(x))))


def test_a_large_image_has_few_kinds_of_windows() -> None:
    """Guards against a map for each of the hundreds of windows of a detector's image: gigabytes."""
    with recorded("position") as values:
        for shift in (0, 7):
            connected, runs = Tiling((200, 334), 14, (shift, shift)).connected_kinds(torch.device("cpu"))
            GaussianMap(14, 2, "semidefinite", True)(connected)
            assert sum(runs.rows) * sum(runs.columns) == 15 * 24
    assert all(len(maps) <= 9 for maps in values["position"])


def backbone(**options) -> PosMLP:
    torch.manual_seed(0)
    return as_features(PosMLP(16, image_size=64, **options)).eval()


def shifted_blocks(model: PosMLP, *shape: int) -> set[int]:
    """Numbers, within the third stage, of the blocks whose windows are masked."""
    masked: set[int] = set()
    for number, block in enumerate(model.stages[2].blocks):
        block.register_forward_hook(lambda _, inputs, __, number=number: masked.add(number) if inputs[2] is not None else None)
    with torch.inference_mode():
        model(torch.randn(1, 3, *shape))
    return masked


def test_large_images_shift_the_windows_of_every_second_block() -> None:
    """Guards against windows that stay apart on a detector's images, and shifts at the size of the training."""
    assert shifted_blocks(backbone(), 64, 64) == set()
    assert shifted_blocks(backbone(), 128, 192) == set(range(1, 18, 2))
    assert shifted_blocks(backbone(), 96, 128) == set(range(18))  # rows are padded, too
    assert shifted_blocks(backbone(), 64, 32) == set(range(18))


# Standard heads on a feature pyramid of 256 channels with 80 classes, as in mmdetection, which Table 8 used: RetinaNet on strides
# 8 to 128 with its P6 from the backbone; Mask R-CNN on strides 4 to 64.
CONV = 256 * 256 * 9 + 256


def retinanet(widths: tuple[int, ...]) -> int:
    pyramid = sum(width * 256 + 256 + CONV for width in widths[1:]) + widths[-1] * 256 * 9 + 256 + CONV
    return pyramid + 8 * CONV + 256 * 9 * (9 * 80 + 9 * 4) + 9 * 80 + 9 * 4


def mask_rcnn(widths: tuple[int, ...]) -> int:
    pyramid = sum(width * 256 + 256 + CONV for width in widths)
    proposals = CONV + 257 * (3 + 12)
    boxes = (256 * 49 + 1) * 1024 + 1025 * 1024 + 1025 * (81 + 320)
    return pyramid + proposals + boxes + 4 * CONV + 256 * 256 * 4 + 256 + 257 * 80


@pytest.mark.parametrize(("name", "retina", "mask"), [("posmlp_t", 31.1, 40.5), ("posmlp_s", 47.3, 56.1)])
def test_detectors_have_the_parameters_of_table_8(name: str, retina: float, mask: float) -> None:
    """Guards against a backbone with its head, without a stage, or with more than norms added. The paper's numbers are to 0.1 M,
    and three of the four differ from ours by 0.1 M in both directions."""
    with torch.device("meta"):
        model = create_model(name, features=True)
    own = sum(p.numel() for p in model.parameters())
    assert (own + retinanet(model.widths)) / 1e6 == pytest.approx(retina, abs=0.14)
    assert (own + mask_rcnn(model.widths)) / 1e6 == pytest.approx(mask, abs=0.1)
