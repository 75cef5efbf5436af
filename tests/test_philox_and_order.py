"""Random numbers and sample order are pure functions, and good ones."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from pipeline.data.order import Blocks, block_sample_at, sample_at
from pipeline.philox import Stream, philox4x32, uniforms


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0, 0, 0, 0], 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, 0xFFFFFFFFFFFFFFFF, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            0x299F31D0A4093822,
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter: list[int], key: int, expected: list[int]) -> None:
    """Guards against a generator that only looks like Philox4x32-10 (known answers: the Random123 distribution)."""
    assert philox4x32(np.array(counter, dtype=np.uint64), key).tolist() == expected


def test_numbers_depend_on_every_argument_and_on_nothing_else() -> None:
    """Guards against two samples, epochs, seeds or uses that share their random numbers, and against batch effects."""
    one = uniforms(Stream.CROP_AND_FLIP, 5, np.array([2]), np.array([7]), 23)
    batch = uniforms(Stream.CROP_AND_FLIP, 5, np.full(100, 2), np.arange(100), 23)
    assert np.array_equal(batch[7:8], one)
    others = [
        uniforms(Stream.STOCHASTIC_DEPTH, 5, np.array([2]), np.array([7]), 23),
        uniforms(Stream.CROP_AND_FLIP, 6, np.array([2]), np.array([7]), 23),
        uniforms(Stream.CROP_AND_FLIP, 5, np.array([3]), np.array([7]), 23),
        uniforms(Stream.CROP_AND_FLIP, 5, np.array([2]), np.array([7 + 2**32]), 23),
    ]
    assert not any(np.isin(other, one).any() for other in others)
    assert 0 <= batch.min() and batch.max() < 1 and abs(batch.mean() - 0.5) < 0.02


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


def test_block_order_of_a_billion_samples_needs_no_memory() -> None:
    """Guards against a list of blocks."""
    places = np.arange(10**9 - 256, 10**9)
    order = block_sample_at(places, 0, 10**9, 3, Blocks(256, 64))
    assert len(set(order.tolist())) == 256 and 0 <= order.min() and order.max() < 10**9
