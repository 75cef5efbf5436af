"""A share of each class: for experiments on how much data a model needs, or for a val split where there is none."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal

import numpy as np

from data_prep.sources.base import Source
from pipeline.data.order import sample_at
from pipeline.errors import UserError
from pipeline.philox import Stream


def take_subset(source: Source, fraction: float, seed: int) -> Source:
    """Keep the same share of every class.

    Of a class's n images round(fraction * n) stay, halves up and at least one. Which ones is the beginning of a random
    order of the class, so with one seed a smaller subset lies inside every larger one; and as images are numbered by
    name, a tree, a zip and the official tar of the same images give the same subset.

    Args:
        source: a whole split.
        fraction: above 0, at most 1; 1 returns the source as it is.
        seed: of the random orders.

    Raises:
        UserError: the fraction is outside.
    """
    check_fraction(fraction)
    if fraction == 1:
        return source
    kept = [order[: max(1, _share(fraction, order.size))] for order in _class_orders(source, seed)]
    subset = source.select(np.sort(np.concatenate(kept)))
    subset.subset = fraction
    return subset


def hold_out(source: Source, share: float, seed: int) -> tuple[Source, Source]:
    """Split a source that has no val split in two.

    Of a class's n images round(share * n) go to val, halves up, at least one but never all: an only image stays in train.
    Which ones is the beginning of a random order of the class.

    Args:
        source: all images.
        share: of val, above 0 and below 1.
        seed: of the random orders.

    Returns:
        The train and the val source.

    Raises:
        UserError: no class has two images.
    """
    orders = _class_orders(source, seed)
    held = [order[: min(max(1, _share(share, order.size)), order.size - 1)] for order in orders]
    val = np.sort(np.concatenate(held))
    if not val.size:
        raise UserError(f"{source.path} has 1 image of each class, at least 2 of one needed by --val-share: add some.")
    return source.select(np.setdiff1d(np.arange(len(source)), val)), source.select(val)


def _class_orders(source: Source, seed: int) -> list[np.ndarray]:
    """A random order of the sample numbers of each class that has any."""
    by_class = np.argsort(source.labels, kind="stable")  # (n,) sample numbers, class after class
    ends = np.cumsum(np.bincount(source.labels, minlength=len(source.class_names)))  # (classes,)
    return [
        members[sample_at(np.arange(members.size), label, members.size, seed, Stream.SUBSET)]
        for label, members in enumerate(np.split(by_class, ends[:-1]))
        if members.size
    ]


def check_fraction(fraction: float) -> None:
    """See before a source is listed, which may take minutes, that its subset can be taken.

    Raises:
        UserError: the fraction is outside.
    """
    if not 0 < fraction <= 1:
        raise UserError(f"--subset is {fraction}, above 0 and at most 1 needed: pass the share of each class to keep.")


def _share(fraction: float, size: int) -> int:
    # In decimal arithmetic, because 0.145 * 100 is 14.499999999999998 in binary.
    return int((Decimal(str(fraction)) * size).to_integral_value(ROUND_HALF_UP))
