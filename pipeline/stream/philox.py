"""Draw counter-based random numbers with Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011).

The generator is stateless: a counter maps to four random 32-bit words. The numbers of sample ``position`` of ``epoch`` are
therefore the same on every rank, in any order of calls, and after a restart, which makes sample order, augmentation and
stochastic depth pure functions of (seed, epoch, position).
"""

from enum import IntEnum

import numpy as np

_MULTIPLIER = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK32 = np.uint64(0xFFFFFFFF)
_SHIFT32 = np.uint64(32)
_ROUNDS = 10
_BLOCKS_PER_STREAM = 1 << 16  # counters reserved per stream: 4 * 65,536 words per sample


class Stream(IntEnum):
    """Purposes of random numbers, with disjoint counters. Never renumber or reuse a stream: runs could not resume.

    An augmentation that is not among them takes its name (:func:`pipeline.augment.stream_number`).
    """

    SHARD_ORDER = 0  # order of the samples in the shards
    SAMPLE_ORDER = 1  # order of an epoch
    CROP_AND_FLIP = 2
    STOCHASTIC_DEPTH = 3
    SUBSET = 4  # which images of a class go into a subset or a held-out split
    RAND_AUGMENT = 5
    ERASING = 6
    MIXING = 7  # per group of samples: ``position`` is the group's number
    BLOCK_ORDER = 8  # block order (pipeline.stream.order): order of the blocks
    WINDOW_ORDER = 9  # block order: order of the samples within a window
    INTERPOLATION = 10  # bicubic or bilinear, for the crop and RandAugment
    THREE_AUGMENT = 11  # and colour jitter
    MIX_ORDER = 12  # data.mix: order of an epoch over all sets, and the seeds of the sets' own orders
    WEIGHTED_ORDER = 13  # weighted samples: where an epoch begins among their weights


def philox4x32(counter: np.ndarray, seed: int) -> np.ndarray:
    """The Philox4x32-10 bijection of (..., 4) words below 2**32, with a 64-bit key whose low word comes first: (..., 4) uint64."""
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


def random_words(stream: int, seed: int, epoch: np.ndarray, position: np.ndarray, count: int) -> np.ndarray:
    """``count`` random 32-bit words for each (epoch, position): (n, count) uint64.

    Args:
        stream: what the words are for: a :class:`Stream`, or another number below 65,536.
        seed: the run's, 0 to 2**64 - 1.
        epoch: (n,) integers below 2**32.
        position: (n,) integers below 2**64: position in the epoch, or another index.
    """
    position = np.asarray(position, dtype=np.uint64)
    blocks = -(-count // 4)
    counter = np.empty((position.size, blocks, 4), dtype=np.uint64)
    counter[..., 0] = (position & _MASK32)[:, None]
    counter[..., 1] = (position >> _SHIFT32)[:, None]
    counter[..., 2] = np.broadcast_to(np.asarray(epoch, dtype=np.uint64), position.shape)[:, None]
    counter[..., 3] = np.arange(blocks, dtype=np.uint64) + np.uint64(int(stream) * _BLOCKS_PER_STREAM)
    return philox4x32(counter, seed).reshape(position.size, 4 * blocks)[:, :count]


def uniforms(stream: int, seed: int, epoch: np.ndarray, position: np.ndarray, count: int) -> np.ndarray:
    """:func:`random_words` scaled to [0, 1): (n, count) float64."""
    return random_words(stream, seed, epoch, position, count) * 2.0**-32
