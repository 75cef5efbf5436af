"""The order of an epoch: a random permutation that is computed, not stored.

``sample_at`` maps a position of an epoch to a sample number through a keyed Feistel network over the next power
of two, stepping on while the result falls outside ("cycle walking"; Black & Rogaway, CT-RSA 2002). Any position
costs the same, at any size, and nothing is kept in memory.
"""

from __future__ import annotations

import numpy as np

from pipeline.philox import Stream, random_words

_ROUNDS = 8  # even, so that halves of unequal width end where they began


def sample_at(
    position: np.ndarray, epoch: np.ndarray, size: int, seed: int, stream: Stream = Stream.SAMPLE_ORDER
) -> np.ndarray:
    """Which sample stands at each position.

    Args:
        position: (n,) integers in [0, size).
        epoch: (n,) integers: another epoch is another permutation.
        size: samples in the set.
        seed: the run's seed.
        stream: keeps uses of the same seed apart.

    Returns:
        (n,) int64 in [0, size); over all positions of one epoch, each sample exactly once.
    """
    bits = max(2, (size - 1).bit_length())
    low_bits = bits // 2
    value = np.array(position, dtype=np.uint64)
    epoch = np.broadcast_to(np.asarray(epoch, dtype=np.uint64), value.shape)
    outside = np.arange(value.size)
    while outside.size:
        value[outside] = _feistel(value[outside], epoch[outside], bits - low_bits, low_bits, seed, stream)
        outside = outside[value[outside] >= size]
    return value.astype(np.int64)


def _feistel(value: np.ndarray, epoch: np.ndarray, high_bits: int, low_bits: int, seed: int, stream: Stream) -> np.ndarray:
    """A permutation of [0, 2**(high_bits + low_bits))."""
    left, right = value >> np.uint64(low_bits), value & np.uint64((1 << low_bits) - 1)
    widths = (high_bits, low_bits)
    for round_ in range(_ROUNDS):
        # A half has at most 32 bits, so the round number fits above it in the counter.
        mix = random_words(stream, seed, epoch, right | np.uint64(round_ << 32), 1)[:, 0]
        mask = np.uint64((1 << widths[round_ % 2]) - 1)
        left, right = right, left ^ (mix & mask)
    return (left << np.uint64(low_bits)) | right
