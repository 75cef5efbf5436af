"""Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011).

A counter goes in, four random 32-bit words come out; there is no state. So the numbers of sample ``position``
of ``epoch`` are the same whichever process asks for them, in whatever order, before or after a restart.
That is what makes order, augmentation and stochastic depth pure functions of (seed, epoch, position).
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

_MULTIPLIER = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK32 = np.uint64(0xFFFFFFFF)
_SHIFT32 = np.uint64(32)
_ROUNDS = 10
_BLOCKS_PER_STREAM = 1 << 16  # room for 4 * 65,536 numbers per sample and stream


class Stream(IntEnum):
    """What the numbers are for. Streams never share a counter; a new use takes a new, never reused, number."""

    SHARD_ORDER = 0  # where each sample goes when the shards are written
    SAMPLE_ORDER = 1  # the order of an epoch
    CROP_AND_FLIP = 2
    STOCHASTIC_DEPTH = 3
    SUBSET = 4  # which images of a class are kept when the shards are written
    RAND_AUGMENT = 5
    ERASING = 6
    MIXING = 7  # of a group of samples: its number stands for the position
    BLOCK_ORDER = 8
    WINDOW_ORDER = 9


def philox4x32(counter: np.ndarray, seed: int) -> np.ndarray:
    """The generator itself.

    Args:
        counter: (..., 4) of unsigned integers below 2**32.
        seed: 64-bit key; its low word is the first key word.

    Returns:
        (..., 4) random words below 2**32, as uint64.
    """
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    key0, key1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(_ROUNDS):
        product0, product1 = _MULTIPLIER[0] * c0, _MULTIPLIER[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT32) ^ c1 ^ np.uint64(key0),
            product1 & _MASK32,
            (product0 >> _SHIFT32) ^ c3 ^ np.uint64(key1),
            product0 & _MASK32,
        )
        key0, key1 = (key0 + _WEYL[0]) & 0xFFFFFFFF, (key1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1)


def random_words(stream: Stream, seed: int, epoch: np.ndarray, position: np.ndarray, count: int) -> np.ndarray:
    """``count`` random 32-bit words for each (epoch, position).

    Args:
        stream: what they are for.
        seed: the run's seed, 0 to 2**64 - 1.
        epoch: (n,) integers below 2**32.
        position: (n,) integers below 2**64: where in the epoch (or any other index).
        count: words per position.

    Returns:
        (n, count) uint64 below 2**32.
    """
    position = np.asarray(position, dtype=np.uint64)
    blocks = -(-count // 4)
    counter = np.empty((position.size, blocks, 4), dtype=np.uint64)
    counter[..., 0] = (position & _MASK32)[:, None]
    counter[..., 1] = (position >> _SHIFT32)[:, None]
    counter[..., 2] = np.broadcast_to(np.asarray(epoch, dtype=np.uint64), position.shape)[:, None]
    counter[..., 3] = np.arange(blocks, dtype=np.uint64) + np.uint64(int(stream) * _BLOCKS_PER_STREAM)
    return philox4x32(counter, seed).reshape(position.size, 4 * blocks)[:, :count]


def uniforms(stream: Stream, seed: int, epoch: np.ndarray, position: np.ndarray, count: int) -> np.ndarray:
    """Like :func:`random_words`, as float64 uniform on [0, 1): (n, count)."""
    return random_words(stream, seed, epoch, position, count) * 2.0**-32
