"""Repeated augmentation (Hoffer et al., CVPR 2020): the length of an epoch, and the places of an image's views in a global batch.

R consecutive positions of an epoch are the R views of one image, and a step takes the next G positions, as with DeiT's
``RASampler``. That gives the positions to processes in turn, so that the views of an image come to different processes. Here
:class:`Placing` puts them into different parts of the global batch, whatever number of processes computes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_EPOCH_UNIT = 256  # repeated augmentation rounds an epoch down to a multiple of this, as RASampler does


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

    A mixing group of more than G // R images cannot hold different images only. Views then stand side by side in the stream's
    order.

    Args:
        global_batch_size: G.
        repeats: R, views of an image.
        epoch_length: positions per epoch, :func:`epoch_length`.
        group: images that are mixed with each other; 1: none.
    """

    global_batch_size: int
    repeats: int
    epoch_length: int
    group: int

    @property
    def spreads(self) -> bool:
        """Whether the views of an image are spread over the global batch."""
        return self.repeats > 1 and self.group <= self.global_batch_size // self.repeats

    @property
    def mixing_distance(self) -> int:
        """The least distance in a mixing group, also around its end, at which images are different."""
        return 1 if self.spreads else self.repeats

    def positions(self, step: int, slot: np.ndarray) -> np.ndarray:
        """The positions in the stream that stand at slots of a global batch.

        Args:
            step: number of the step, from 0.
            slot: (n,) integers in [0, G).

        Returns:
            (n,) int64; over all slots, the positions from ``step * G`` to ``(step + 1) * G - 1``.
        """
        size, views, length = self.global_batch_size, self.repeats, self.epoch_length
        first = step * size
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


def _locate(place: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """In parts of given lengths, one after another: the part in which each place lies, and the place within it."""
    ends = np.cumsum(lengths)
    part = np.searchsorted(ends, place, side="right")
    return part, place - (ends - lengths)[part]
