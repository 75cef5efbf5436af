"""Several sets in one run: every position has its sample by arithmetic alone, and each set is shown as often as its weight says."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from pipeline.stream.order import Blocks, blocks_of_window
from pipeline.stream.samples import Mixture

SMALL, ODD = Blocks(4, 3), Blocks(1, 1)
SEED = 11


def epoch(mixture: Mixture, number: int, blocks: Blocks | None) -> np.ndarray:
    """(images,) samples of an epoch."""
    return mixture.sample_at(np.arange(mixture.images), np.full(mixture.images, number), SEED, blocks)


@pytest.mark.parametrize("blocks", [None, SMALL, ODD, Blocks(256, 64)])
@pytest.mark.parametrize("sizes", [(40,), (40, 17), (5, 60, 24), (1, 1)])
def test_with_weight_one_an_epoch_is_every_image_once(sizes: tuple[int, ...], blocks: Blocks | None) -> None:
    """Guards against images at the parts' borders that are lost or come twice."""
    mixture = Mixture(sizes, (1.0,) * len(sizes))
    for number in (0, 3):
        assert np.array_equal(np.sort(epoch(mixture, number, blocks)), np.arange(sum(sizes)))


@pytest.mark.parametrize("blocks", [None, SMALL])
def test_weights_are_kept_and_no_image_comes_again_before_all_others(blocks: Blocks | None) -> None:
    """Guards against a fraction that is drawn anew in each epoch, which shows some images often and others never."""
    mixture = Mixture((90, 60, 40), (1.0, 0.5, 2.0))
    assert mixture.shown.tolist() == [90, 30, 80] and mixture.shares == [0.45, 0.15, 0.4]
    epochs = [epoch(mixture, number, blocks) for number in range(4)]
    for order in epochs:
        counts = Counter(order.tolist())
        assert all(counts[sample] == 1 for sample in range(90))
        assert all(counts[sample] == 2 for sample in range(150, 190))
        assert sum(counts[sample] for sample in range(90, 150)) == 30
    for pair in (epochs[:2], epochs[2:]):
        assert Counter(np.concatenate(pair).tolist()) == {
            sample: 2 if sample < 90 else 1 if sample < 150 else 4 for sample in range(190)
        }


def test_sets_are_spread_over_an_epoch_and_shuffled_apart() -> None:
    """Guards against sets one after another, the same order in each epoch, and sets of one size that are shuffled alike."""
    mixture = Mixture((5000, 5000), (1.0, 1.0))
    first, second = epoch(mixture, 0, None), epoch(mixture, 1, None)
    quarters = (first.reshape(4, 2500) >= 5000).sum(1)
    assert (np.abs(quarters - 1250) < 150).all() and (first == second).sum() < 20
    orders = [order[order < 5000] for order in (first, second)], first[first >= 5000] - 5000
    assert (orders[0][0] == orders[1]).sum() < 20 and (orders[0][0] == orders[0][1]).sum() < 20
    half = epoch(Mixture((5000, 5000), (0.5, 0.5)), 0, None)
    assert abs(len(np.intersect1d(half[half < 5000], half[half >= 5000] - 5000)) - 1250) < 150  # sets in one order: 2500


def test_block_order_reads_few_blocks_of_each_set_at_a_time() -> None:
    """Guards against a mixture that reads all over the disk."""
    mixture, blocks = Mixture((40_000, 10_000), (1.0, 1.0)), Blocks(50, 16)
    order = epoch(mixture, 0, blocks)
    for start in range(800, 49_000, 4000):
        part = order[start : start + 800]
        for first, end, share in ((0, 40_000, 0.8), (40_000, 50_000, 0.2)):
            its = np.sort(part[(part >= first) & (part < end)])
            assert abs(len(its) / 800 - share) < 0.05
            assert 1 + (np.diff(its) > 50).sum() <= 3 * 16 + 3, "at most three windows of 16 blocks"


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 0.3), (1.0, 2.5)])
def test_what_is_read_has_been_announced_once(weights: tuple[float, float]) -> None:
    """Guards against announcements for other samples than those that come, and against gigabytes that are announced twice."""
    mixture, blocks, batch = Mixture((150, 85), weights), Blocks(8, 4), 32
    announced: Counter[int] = Counter()
    for which, first in enumerate((0, 150)):  # a set's first window is read without
        for start, count in blocks_of_window(0, 0, mixture.sizes[which], mixture.seed_of(which, SEED), blocks):
            announced.update(range(first + start, first + start + count))
    before = None
    for number in range(3 * mixture.images // batch):
        now = divmod(number * batch + batch - 1, mixture.images)
        for start, count in mixture.coming_runs(before, now, SEED, blocks):
            assert start >= 0 and start + count <= (150 if start < 150 else 235)
            announced.update(range(start, start + count))
        positions = np.arange(number * batch, (number + 1) * batch)
        read = mixture.sample_at(positions % mixture.images, positions // mixture.images, SEED, blocks)
        assert all(announced[sample] for sample in read.tolist())
        before = now
    assert max(announced.values()) <= 3 * np.ceil(max(weights)) + 1


def test_two_billion_images_need_no_memory() -> None:
    """Guards against an order that is stored, and against overflow."""
    mixture = Mixture((10**9, 2 * 10**9), (1.0, 0.5))
    places = np.arange(mixture.images - 256, mixture.images)
    for blocks in (None, Blocks(256, 64)):
        order = mixture.sample_at(places, np.full(256, 89), SEED, blocks)
        assert len(set(order.tolist())) == 256 and order.min() >= 0 and order.max() < 3 * 10**9
        assert 64 < (order < 10**9).sum() < 192
