"""The order of samples is a pure function, and a good one."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from pipeline.stream.order import Blocks, block_sample_at, blocks_of_window, count_windows, sample_at


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 1437, 100_003])
def test_an_epoch_is_a_permutation(size: int) -> None:
    """Guards against an epoch that repeats or loses a sample."""
    order = sample_at(np.arange(size), 3, size, seed=11)
    assert np.array_equal(np.sort(order), np.arange(size))


def test_epochs_and_seeds_differ_and_places_are_uniform() -> None:
    """Guards against an order that repeats, or that favours some samples for some places."""
    size = 1000
    orders = [sample_at(np.arange(size), epoch, size, seed) for epoch, seed in ((0, 0), (1, 0), (0, 1))]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert (orders[a] == orders[b]).sum() < 10
    first = Counter(sample_at(np.zeros(5000, int), np.arange(5000), 5, seed=1).tolist())
    assert all(900 < first[sample] < 1100 for sample in range(5))
    assert abs(np.corrcoef(orders[0], np.arange(size))[0, 1]) < 0.1


def test_a_billion_samples_need_no_memory() -> None:
    """Guards against an order that is stored: a billion entries would be 8 GB."""
    places = np.arange(10**9 - 256, 10**9)
    order = sample_at(places, 0, 10**9, seed=3)
    assert len(set(order.tolist())) == 256 and 0 <= order.min() and order.max() < 10**9


@pytest.mark.parametrize("size", [1, 7, 64, 1437, 100_003])
@pytest.mark.parametrize("blocks", [Blocks(1, 1), Blocks(10, 3), Blocks(256, 64)])
def test_an_epoch_in_block_order_is_a_permutation(size: int, blocks: Blocks) -> None:
    """Guards against samples that the incomplete last block or window repeats or loses."""
    for epoch in (0, 1):
        order = block_sample_at(np.arange(size), epoch, size, 11, blocks)
        assert np.array_equal(np.sort(order), np.arange(size))


def test_a_window_of_block_order_reads_few_blocks_and_shuffles_them() -> None:
    """Guards against a block order that reads all over the disk, and against one that does not shuffle."""
    size, blocks = 100_003, Blocks(size=50, window=8)
    orders = [block_sample_at(np.arange(size), epoch, size, 11, blocks) for epoch in (0, 1)]
    for order in orders:
        for window in range(size // blocks.window_samples - 1):
            samples = np.sort(order[window * 400 : (window + 1) * 400])
            runs = 1 + (np.diff(samples) != 1).sum()
            assert runs <= 8 + 1, "eight blocks; one may lie around the end of the set"
    first = orders[0][:400]
    assert abs(np.corrcoef(first, np.arange(400))[0, 1]) < 0.2 and (np.diff(first) == 1).mean() < 0.1
    assert abs(np.corrcoef(orders[0], np.arange(size))[0, 1]) < 0.1
    # Neighbours part from epoch to epoch, and no sample stays at the end.
    assert len(set(orders[0][:400]) & set(orders[1][:400])) < 100
    assert len(set(orders[0][-400:]) & set(orders[1][-400:])) < 100


def test_block_boundaries_shift_from_epoch_to_epoch() -> None:
    """Guards against neighbours that always share a block."""
    size, blocks = 1000, Blocks(size=50, window=4)
    phases = Counter[int]()
    for epoch in range(500):
        windows = range(count_windows(size, blocks))
        starts = {start for window in windows for start, _ in blocks_of_window(window, epoch, size, 11, blocks)}
        (phase,) = {start % blocks.size for start in starts - {0}}  # at 0 goes on what began at the set's end
        phases[phase] += 1
    assert len(phases) == blocks.size and max(phases.values()) < 30, phases  # 10 each, expected


def test_block_order_of_a_billion_samples_needs_no_memory() -> None:
    """Guards against a list of blocks."""
    places = np.arange(10**9 - 256, 10**9)
    order = block_sample_at(places, 0, 10**9, 3, Blocks(256, 64))
    assert len(set(order.tolist())) == 256 and 0 <= order.min() and order.max() < 10**9
