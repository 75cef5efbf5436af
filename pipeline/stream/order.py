"""Compute the order of an epoch, a random permutation that is not stored, and the places of views in a global batch.

``sample_at`` maps a position of an epoch to a sample number with a keyed Feistel network over the next power of two, repeated
while the result is out of range (cycle walking; Black & Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002). The
cost per position does not depend on the size of the set, and needs no memory. ``block_sample_at`` is a variant that keeps
samples adjacent on disk close in time.

Repeated augmentation (Hoffer et al., CVPR 2020) shows R views of an image: R consecutive positions of an epoch, and a step takes the
next G positions, as with DeiT's ``RASampler``, which gives them to processes in turn; :class:`Placing` does so for any number.
"""

from dataclasses import dataclass

import numpy as np

from pipeline.stream.philox import Stream, random_words, uniforms

_ROUNDS = 8  # even, so that halves of unequal width end up in their original places
_EPOCH_UNIT = 256  # repeated augmentation rounds an epoch down to a multiple of this, as RASampler does
_GOLDEN = (5**0.5 - 1) / 2
_SALT_SHIFT = np.uint64(36)  # the counter holds a half (at most 32 bits), the round number (3 bits), and above them the salt


@dataclass(frozen=True)
class Blocks:
    """Block order: shuffle blocks of ``size`` adjacent samples, then the samples within windows of ``window`` blocks."""

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
    """The sample at each position of an epoch of ``size`` samples, all (n,) integers: over one epoch, a permutation of [0, size).

    Each epoch, seed, stream and salt (below 2**28) has its own permutation.
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


@dataclass(frozen=True, eq=False)
class Weights:
    """How often an epoch of n images shows each of n samples, and in which order.

    Systematic sampling, shuffled: a sample that is due 2.3 times comes two or three times in every epoch, and neighbours that are due once
    together once. Where an epoch begins among them follows the golden ratio, so that none waits long for its turn. With equal weights the
    order is that of :func:`sample_at`.
    """

    ends: np.ndarray  # (n,) float64: where each sample's part of [0, n) ends; infinity where only weights of 0 follow
    samples: np.ndarray  # (n,) int64: whose parts they are

    @classmethod
    def of(cls, weights: np.ndarray, samples: np.ndarray | None = None) -> "Weights":
        """Of (n,) weights of at least 0; ``samples`` orders them, so that those of a group are neighbours."""
        samples = np.arange(len(weights)) if samples is None else samples
        ends = np.cumsum(weights[samples], dtype=np.float64)
        ends = ends * (len(ends) / ends[-1])
        return cls(np.where(ends >= ends[-1], np.inf, ends), samples)

    def sample_at(self, position: np.ndarray, epoch: np.ndarray, seed: int) -> np.ndarray:
        """The sample at each position of an epoch; arguments and result as for :func:`sample_at`."""
        place = sample_at(position, epoch, len(self.ends), seed)
        begin = uniforms(Stream.WEIGHTED_ORDER, seed, np.zeros(1), np.zeros(1), 1)[0, 0]
        shift = (begin + epoch * _GOLDEN) % 1.0
        return self.samples[np.searchsorted(self.ends, place + shift, side="right")]


def block_sample_at(position: np.ndarray, epoch: np.ndarray, size: int, seed: int, blocks: Blocks) -> np.ndarray:
    """The sample at each position of an epoch in block order. Arguments and result as for :func:`sample_at`.

    A window holds ``blocks.window`` complete blocks; the last window also takes the remaining blocks and the incomplete one.
    Block boundaries shift from epoch to epoch, so that no sample is always in the incomplete block.
    """
    position = np.asarray(position, dtype=np.int64)
    windows = count_windows(size, blocks)
    window = np.minimum(position // blocks.window_samples, windows - 1)
    place = position - window * blocks.window_samples

    last = window == windows - 1  # larger than the others: takes the remainder
    shuffled = np.empty_like(position)
    for members, length in ((last, size - (windows - 1) * blocks.window_samples), (~last, blocks.window_samples)):
        if members.any():
            keys = np.broadcast_to(epoch, position.shape)[members], length, seed, Stream.WINDOW_ORDER, window[members]
            shuffled[members] = sample_at(place[members], *keys)
    number, offset = np.divmod(window * blocks.window_samples + shuffled, blocks.size)  # of the block in the epoch's order
    return (_block_start(number, epoch, size, seed, blocks) + offset) % size


def count_windows(size: int, blocks: Blocks) -> int:
    """Number of windows per epoch."""
    return max(1, size // blocks.size // blocks.window)


def blocks_of_window(window: int, epoch: int, size: int, seed: int, blocks: Blocks) -> list[tuple[int, int]]:
    """The runs of adjacent samples that a window of the epoch reads: (first sample, number of samples) each."""
    last = window == count_windows(size, blocks) - 1
    first = window * blocks.window
    number = np.arange(first, -(-size // blocks.size) if last else first + blocks.window)
    lengths = np.minimum(blocks.size, size - number * blocks.size)
    runs = []
    for start, length in zip((_block_start(number, epoch, size, seed, blocks) % size).tolist(), lengths.tolist()):
        before_the_end = min(length, size - start)
        runs += [(start, before_the_end), (0, length - before_the_end)]
    return [run for run in runs if run[1]]


def epoch_length(images: int, repeats: int) -> int:
    """Images per epoch, repeated views included.

    Without repeated augmentation, an epoch shows every image once. With it, it shows the first ``length / repeats`` images of the
    epoch's order, ``repeats`` times each, where the length is the size of the set rounded down to a multiple of 256.
    """
    return images if repeats == 1 else images // _EPOCH_UNIT * _EPOCH_UNIT or images


@dataclass(frozen=True)
class Placing:
    """Which position of the stream stands at which slot of a step's global batch.

    The images of the step are columns of R views, and the global batch is read row by row: one view of every image, then another
    view of every image, and so on, view v of the step's i-th image at slot v G / R + i. Images of which the step has only some
    views (at its ends and at the end of an epoch) come after the complete ones and fill the columns one after another. So two
    views of an image are at least G // R slots apart: micro-batches and mixing groups of at most G // R images hold different
    images only, except that a step in which an epoch ends may have an image from both epochs.

    Larger mixing groups cannot hold different images only: views then stand side by side in the stream's order.
    """

    global_batch_size: int  # G
    repeats: int  # R, views of an image
    epoch_length: int  # positions per epoch, :func:`epoch_length`
    group: int  # images that are mixed with each other; 1: none
    begin: int = 0  # position in the stream at which step 0 begins

    @property
    def spreads(self) -> bool:
        return self.repeats > 1 and self.group <= self.global_batch_size // self.repeats

    @property
    def mixing_distance(self) -> int:
        """The least distance in a mixing group, also around its end, at which images are different."""
        return 1 if self.spreads else self.repeats

    def positions(self, step: int, slot: np.ndarray) -> np.ndarray:
        """The positions in the stream that stand at slots, (n,) int64 in [0, G), of a step's global batch.

        Over all slots they are those from ``begin + step * G`` to ``begin + (step + 1) * G - 1``.
        """
        size, views, length = self.global_batch_size, self.repeats, self.epoch_length
        first = self.begin + step * size
        if not self.spreads:
            return first + slot
        epochs = np.arange(first // length, (first + size - 1) // length + 1, dtype=np.int64) * length  # their beginnings
        begin, end = np.maximum(epochs, first), np.minimum(epochs + length, first + size)  # of the step's part of each
        complete = np.minimum(epochs + -(-(begin - epochs) // views) * views, end)  # where its complete images begin, and end:
        rest = end - (end - complete) % views

        rows = -(-(size - np.arange(views)) // views)  # slots of each row
        row, column = _locate(slot, rows)
        run, offset = _locate(column * views + row, np.concatenate([rest - complete, complete - begin, end - rest]))
        return np.concatenate([complete, begin, rest])[run] + offset


def _block_start(number: np.ndarray, epoch: np.ndarray | int, size: int, seed: int, blocks: Blocks) -> np.ndarray:
    """First sample of the ``number``-th block in the order of the epoch, not reduced modulo the size of the set: (n,) int64."""
    epoch = np.broadcast_to(np.asarray(epoch), number.shape)
    whole_blocks = size // blocks.size
    block = number.copy()  # the incomplete block stays last
    whole = number < whole_blocks
    if whole.any():
        block[whole] = sample_at(number[whole], epoch[whole], whole_blocks, seed, Stream.BLOCK_ORDER)
    shift = random_words(Stream.BLOCK_ORDER, seed, epoch, np.full(number.size, 1 << 62), 1)[:, 0].astype(np.int64)
    return block * blocks.size + shift


def _feistel(
    value: np.ndarray, epoch: np.ndarray, salt: np.ndarray, high_bits: int, low_bits: int, seed: int, stream: Stream
) -> np.ndarray:
    """A keyed permutation of [0, 2**(high_bits + low_bits))."""
    left, right = value >> np.uint64(low_bits), value & np.uint64((1 << low_bits) - 1)
    widths = (high_bits, low_bits)
    for round_ in range(_ROUNDS):
        mix = random_words(stream, seed, epoch, right | np.uint64(round_ << 32) | (salt << _SALT_SHIFT), 1)[:, 0]
        mask = np.uint64((1 << widths[round_ % 2]) - 1)
        left, right = right, left ^ (mix & mask)
    return (left << np.uint64(low_bits)) | right


def _locate(place: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """In parts of given lengths, one after another: the part in which each place lies, and the place within it."""
    ends = np.cumsum(lengths)
    part = np.searchsorted(ends, place, side="right")
    return part, place - (ends - lengths)[part]
