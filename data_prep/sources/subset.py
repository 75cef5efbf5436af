"""Draw stratified subsets: a fraction of each class for data-efficiency experiments, or held out as a val split."""

from __future__ import annotations

import re
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import numpy as np

from data_prep.sources.base import Source
from pipeline.errors import UserError, first_few
from pipeline.stream.order import sample_at
from pipeline.stream.philox import Stream

RANDOM, FIRST = "random", "first"  # rules of a subset


def take_classes(source: Source, asked: str) -> Source:
    """Keep some classes, in their order, with labels from 0: ConViT's Fig. 8 and 12 are of ImageNet's first hundred.

    Args:
        source: a complete split.
        asked: numbers and ranges in class order, from 0, with commas between (``0-99``), or a file with a class a line.

    Raises:
        UserError: the source has no such class.
    """
    names = source.class_names
    if re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", asked):
        ends = [part.partition("-")[::2] for part in asked.split(",")]
        ranges = [(int(first), int(last or first)) for first, last in ends]
        if any(not first <= last < len(names) for first, last in ranges):
            raise UserError(
                f"--classes must be of 0 to {len(names) - 1}, the classes of {source.path}, got {asked}", "correct it"
            )
        chosen = [number for number in range(len(names)) if any(first <= number <= last for first, last in ranges)]
    else:
        try:
            listed = [line.strip() for line in Path(asked).read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, ValueError):
            problem = f"--classes must be numbers such as 0-99, or a readable file with a class a line, got {asked}"
            raise UserError(problem, "correct it") from None
        known, wanted = set(names), set(listed)  # there may be 100,000
        if not listed or (unknown := [name for name in listed if name not in known]):
            problem = f"--classes {asked} must list classes of {source.path} ({first_few(names)}), got "
            raise UserError(problem + (first_few(unknown) if listed else "none"), "correct the file")
        chosen = [number for number, name in enumerate(names) if name in wanted]
    kept = source.select(np.flatnonzero(np.isin(source.labels, chosen)))
    kept.class_names = [names[number] for number in chosen]
    kept.labels = np.searchsorted(chosen, kept.labels).astype(np.int32)
    return kept


def take_subset(source: Source, fraction: float, seed: int, rule: str = RANDOM) -> Source:
    """Keep the same fraction of every class, at least one image.

    ``random`` keeps round(fraction * n) of a class's n images, rounded half up: the first of a random order of the class.
    ``first`` keeps int(fraction * n), the first by name, as the data sets of ConViT's and PerViT's code do
    (``make_subsampled_dataset``). Subsets of the same rule and seed are nested, and since images are numbered by name, a tree, a
    zip and the official tar of the same images give the same subset.

    Args:
        source: a complete split.
        fraction: above 0, at most 1; 1 returns the source unchanged.
        seed: determines the random orders.
        rule: RANDOM or FIRST.

    Raises:
        UserError: the fraction is out of range.
    """
    check_fraction(fraction)
    if fraction == 1:
        return source
    if rule == FIRST:  # in binary floating point, as the reference: 28 of 100 for 0.29
        kept = [members[: max(1, int(fraction * members.size))] for _, members in _classes(source)]
    else:
        kept = [order[: max(1, _share(fraction, order.size))] for order in _class_orders(source, seed)]
    subset = source.select(np.sort(np.concatenate(kept)))
    subset.subset, subset.subset_rule = fraction, rule
    return subset


def hold_out(source: Source, share: float, seed: int) -> tuple[Source, Source]:
    """Hold out a val split from a source that has none.

    Of a class's n images, round(share * n) go to val, rounded half up, at least one but never all: a single image stays in
    train. They are the first of a random order of the class.

    Args:
        source: all images.
        share: fraction for val, above 0 and below 1.
        seed: determines the random orders.

    Returns:
        The train and the val source.

    Raises:
        UserError: no class has two images.
    """
    orders = _class_orders(source, seed)
    held = [order[: min(max(1, _share(share, order.size)), order.size - 1)] for order in orders]
    val = np.sort(np.concatenate(held))
    if not val.size:
        raise UserError(f"--val-share requires at least 2 images of a class, got 1 of each in {source.path}", "add some")
    return source.select(np.setdiff1d(np.arange(len(source)), val)), source.select(val)


def _class_orders(source: Source, seed: int) -> list[np.ndarray]:
    """A random order of the sample numbers of each non-empty class."""
    return [
        members[sample_at(np.arange(members.size), label, members.size, seed, Stream.SUBSET)]
        for label, members in _classes(source)
    ]


def _classes(source: Source) -> list[tuple[int, np.ndarray]]:
    """The label and the sample numbers of each non-empty class, in the order of their names."""
    by_class = np.argsort(source.labels, kind="stable")  # (n,) sample numbers, class after class
    ends = np.cumsum(np.bincount(source.labels, minlength=len(source.class_names)))  # (classes,)
    return [(label, members) for label, members in enumerate(np.split(by_class, ends[:-1])) if members.size]


def check_fraction(fraction: float) -> None:
    """Check the fraction before a source is listed, which may take minutes.

    Raises:
        UserError: the fraction is out of range.
    """
    if not 0 < fraction <= 1:
        raise UserError(f"--subset must be above 0 and at most 1, got {fraction}", "pass the fraction of each class to keep")


def _share(fraction: float, size: int) -> int:
    # Decimal arithmetic: 0.145 * 100 is 14.499999999999998 in binary floating point.
    return int((Decimal(str(fraction)) * size).to_integral_value(ROUND_HALF_UP))
