"""The order of an epoch: a random permutation that is computed, not stored.

``sample_at`` maps a position of an epoch to a sample number through a keyed Feistel network over the next power
of two, stepping on while the result falls outside ("cycle walking"; Black & Rogaway, CT-RSA 2002). Any position
costs the same, at any size, and nothing is kept in memory. ``block_sample_at`` does the same with neighbours on disk kept
close in time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.philox import Stream, random_words

_ROUNDS = 8  # even, so that halves of unequal width end where they began
_SALT_SHIFT = np.uint64(36)  # a half has at most 32 bits and the round number three: the salt goes above


@dataclass(frozen=True)
class Blocks:
    """Block order: blocks of ``size`` neighbours are shuffled, then the samples of ``window`` blocks in a row."""

    size: int
    window: int

    @property
    def window_samples(self) -> int:
        return self.size * self.window


def sample_at(
    position: np.ndarray,
    epoch: np.ndarray | int,
    size: int,
    seed: int,
    stream: Stream = Stream.SAMPLE_ORDER,
    salt: np.ndarray | int = 0,
) -> np.ndarray:
    """Which sample stands at each position.

    Args:
        position: (n,) integers in [0, size).
        epoch: (n,) integers: another epoch is another permutation.
        size: samples in the set.
        seed: the run's seed.
        stream: keeps uses of the same seed apart.
        salt: (n,) integers below 2**28: another salt is another permutation too.

    Returns:
        (n,) int64 in [0, size); over all positions of one epoch, each sample exactly once.
    """
    bits = max(2, (size - 1).bit_length())
    low_bits = bits // 2
    value = np.array(position, dtype=np.uint64)
    epoch = np.broadcast_to(np.asarray(epoch, dtype=np.uint64), value.shape)
    salt = np.broadcast_to(np.asarray(salt, dtype=np.uint64), value.shape)
    outside = np.arange(value.size)
    while outside.size:
        walking = (value[outside], epoch[outside], salt[outside])
        value[outside] = _feistel(*walking, bits - low_bits, low_bits, seed, stream)
        outside = outside[value[outside] >= size]
    return value.astype(np.int64)


def block_sample_at(position: np.ndarray, epoch: np.ndarray, size: int, seed: int, blocks: Blocks) -> np.ndarray:
    """Which sample stands at each position of a block order. Arguments and result as for :func:`sample_at`.

    A window holds ``blocks.window`` whole blocks. The samples of the last, incomplete block go with the last window; where
    blocks begin moves from epoch to epoch, so that no sample is always at the end.
    """
    position = np.asarray(position, dtype=np.int64)
    windows = count_windows(size, blocks)
    window = np.minimum(position // blocks.window_samples, windows - 1)
    place = position - window * blocks.window_samples

    last = window == windows - 1  # larger than the others: it takes what does not fill a window
    shuffled = np.empty_like(position)
    for members, length in ((last, size - (windows - 1) * blocks.window_samples), (~last, blocks.window_samples)):
        if members.any():
            keys = np.broadcast_to(epoch, position.shape)[members], length, seed, Stream.WINDOW_ORDER, window[members]
            shuffled[members] = sample_at(place[members], *keys)
    number, offset = np.divmod(window * blocks.window_samples + shuffled, blocks.size)  # of the block in the epoch's order
    return (_block_start(number, epoch, size, seed, blocks) + offset) % size


def count_windows(size: int, blocks: Blocks) -> int:
    """Windows of an epoch."""
    return max(1, size // blocks.size // blocks.window)


def blocks_of_window(window: int, epoch: int, size: int, seed: int, blocks: Blocks) -> list[tuple[int, int]]:
    """The (first sample, number of samples) of every run of neighbours that a window of the epoch reads."""
    last = window == count_windows(size, blocks) - 1
    first = window * blocks.window
    number = np.arange(first, -(-size // blocks.size) if last else first + blocks.window)
    lengths = np.minimum(blocks.size, size - number * blocks.size)
    runs = []
    for start, length in zip((_block_start(number, epoch, size, seed, blocks) % size).tolist(), lengths.tolist()):
        before_the_end = min(length, size - start)
        runs += [(start, before_the_end), (0, length - before_the_end)]
    return [run for run in runs if run[1]]


def _block_start(number: np.ndarray, epoch: np.ndarray | int, size: int, seed: int, blocks: Blocks) -> np.ndarray:
    """Where the ``number``-th block that the epoch reads begins, counted on past the end of the set: (n,) int64."""
    epoch = np.broadcast_to(np.asarray(epoch), number.shape)
    whole_blocks = size // blocks.size
    block = number.copy()  # the incomplete block at the end stays there
    whole = number < whole_blocks
    if whole.any():
        block[whole] = sample_at(number[whole], epoch[whole], whole_blocks, seed, Stream.BLOCK_ORDER)
    shift = random_words(Stream.BLOCK_ORDER, seed, epoch, np.full(number.size, 1 << 62), 1)[:, 0].astype(np.int64)
    return block * blocks.size + shift


def _feistel(
    value: np.ndarray, epoch: np.ndarray, salt: np.ndarray, high_bits: int, low_bits: int, seed: int, stream: Stream
) -> np.ndarray:
    """A permutation of [0, 2**(high_bits + low_bits))."""
    left, right = value >> np.uint64(low_bits), value & np.uint64((1 << low_bits) - 1)
    widths = (high_bits, low_bits)
    for round_ in range(_ROUNDS):
        mix = random_words(stream, seed, epoch, right | np.uint64(round_ << 32) | (salt << _SALT_SHIFT), 1)[:, 0]
        mask = np.uint64((1 << widths[round_ % 2]) - 1)
        left, right = right, left ^ (mix & mask)
    return (left << np.uint64(low_bits)) | right
