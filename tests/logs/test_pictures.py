"""TensorBoard's pictures say what they show: tiles apart, with labels; peripheral attention in colours of known values."""

from __future__ import annotations

import torch

from pipeline.loader.loader import Batch
from pipeline.logs import pictures

MEAN, STD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
WHITE, BLACK, YELLOW = [255, 255, 255], [0, 0, 0], [0xFD, 0xE7, 0x25]


def test_training_images_stand_apart_with_their_labels() -> None:
    """Guards against a grid in which, under CutMix and erasing, nobody can tell where images end, or which classes they are."""
    red = torch.tensor([1.0, -1.0, -1.0])[:, None, None].expand(3, 60, 60)  # normalized
    labels, others = torch.tensor([0, 1, 2, 2]), torch.tensor([1, 1, 0, 0])
    weight = torch.tensor([0.3, 0.6, 1.0, 0.75])
    batch = Batch(red.expand(4, 3, 60, 60), labels, others, weight, torch.ones(4, dtype=torch.bool), None, 0)
    classes = ["cat", "dog", "a_class_whose_name_is_far_too_long_for_one_picture"]
    assert pictures._labels(batch, classes) == ["70 % dog\n+ 30 % cat", "dog", classes[2], f"75 % {classes[2]}\n+ 25 % cat"]

    grid = pictures.image_grid(batch, classes, MEAN, STD)
    assert grid.dtype == torch.uint8
    is_red = (grid == torch.tensor([255, 0, 0])[:, None, None]).all(dim=0)
    columns, rows = is_red.any(dim=0).int().diff(), is_red.any(dim=1).sum()
    assert (columns == 1).sum() == 4 and rows == 120  # four images with gaps between them, each pixel twice
    under = grid[:, is_red.any(dim=1).nonzero().max() + 1 :]  # (3, h, width)
    written = (under.amax(dim=0) < 128).any(dim=0)  # columns with letters in them
    assert written[:120].any() and not (written & ~is_red.any(dim=0)).any(), "a label runs into its neighbour's"


def test_peripheral_maps_are_readable_on_a_small_grid() -> None:
    """Guards against grey tiles of a few pixels: 4 x 4 patches, 3 layers, 2 heads, of which one sees only its own patch."""
    maps = torch.zeros(3, 2, 4, 4)
    maps[1, 1, 2, 3] = 1.0
    grid = pictures.map_grid(maps)
    is_one = (grid == torch.tensor(YELLOW)[:, None, None]).all(dim=0)
    is_zero = (grid == torch.tensor([0x44, 0x01, 0x54])[:, None, None]).all(dim=0)
    rows, columns = is_one[: grid.shape[1] - 22].nonzero().unbind(dim=1)  # without the scale at the bottom
    assert len(rows) == 14 * 14 and rows.max() - rows.min() == columns.max() - columns.min() == 13  # one square
    tiles = is_zero[: grid.shape[1] - 22] | is_one[: grid.shape[1] - 22]
    assert tiles.sum() == 3 * 2 * 56 * 56
    starts = tiles.any(dim=1).int().diff().eq(1).nonzero().flatten() + 1
    assert len(starts) == 3 and rows.min() == starts[1] + 2 * 14  # layers are rows, from above
    left = tiles.any(dim=0).nonzero().min()
    for start in starts.tolist():
        assert (grid[:, start : start + 56, :left].amax(dim=0) < 128).any(), "a row without its layer's name"
    assert (grid[:, : starts[0]].amax(dim=0) < 128).any(), "no names of heads"
    assert is_one[-22:].any() and is_zero[-22:].any(), "no scale"


def test_the_axes_count_patches() -> None:
    """Guards against maps of which nobody can tell how many patches they have and which of them is the query's."""
    small, large = (pictures.map_grid(torch.zeros(2, 2, side, side)) for side in (4, 14))
    is_zero = (large == torch.tensor([0x44, 0x01, 0x54])[:, None, None]).all(dim=0)[:-22]
    ends = is_zero.any(dim=1).int().diff().eq(-1).nonzero().flatten() + 1
    assert len(ends) == 2 and (large[:, ends[-1] : -22].amax(dim=0) < 128).any(), "no axis below the maps"
    ticks = [((grid[:, :, 20:70] < 128).all(dim=0)).any(dim=0).int() for grid in (small, large)]
    assert not torch.equal(*ticks), "the axis is the same for 4 and for 14 patches"


def test_classes_are_bars_and_many_of_them_the_worst_and_the_best() -> None:
    """Guards against a picture of a thousand lines, bars of the wrong length, and a class without images that counts as wrong."""
    green = torch.tensor([0x21, 0x91, 0x8C])[:, None, None]
    grid = pictures.class_bars(["all", "none", "half", "absent"], [4, 0, 2, 0], [4, 4, 4, 0])
    lengths = (grid == green).all(dim=0).sum(dim=1)
    assert sorted(set(lengths.tolist())) == [0, 61, 121]
    assert lengths.nonzero().min() < lengths.argmax(), "not sorted from the worst to the best"

    many = pictures.class_bars([f"class {i} " + "x" * 80 for i in range(1000)], range(1000), [1000] * 1000)
    assert many.shape[1] < 330 and many.shape[2] < 900
    middle = many.shape[2] // 2
    lengths = [(part == green).all(dim=0).sum(dim=1) for part in (many[:, :, :middle], many[:, :, middle:])]
    assert lengths[0].max() <= 4 and (lengths[1] >= 118).any()  # of 121: the worst are below 2 %, the best above 98 %
    assert ((many[:, :, 4:150] < 128).all(dim=0)).any(dim=1).sum() > 100, "no names"
    assert pictures.class_bars(["a"], [0], [0]).shape[0] == 3
