"""Do the splits of a data set show the same classes? A model cannot learn one that only the val split has."""

from __future__ import annotations

from collections.abc import Set

from data_prep import counted


def untaught_classes(train: Set[str], val: Set[str]) -> str:
    """What is wrong when val has classes without an image in train; empty when there are none.

    Args:
        train: classes with images in the train split.
        val: likewise.
    """
    foreign = sorted(val - train)
    return f"val has images of {_listed(foreign)} that train has none of" if foreign else ""


def unseen_classes(train: Set[str], val: Set[str]) -> str:
    """What is odd when train has classes without an image in val; empty when there are none."""
    unseen = sorted(train - val)
    return f"val has no images of {_listed(unseen)} that train has, so accuracy says nothing about them" if unseen else ""


def classes_with_images(names: list[str], counts: list[int]) -> set[str]:
    """The names whose count is above 0."""
    return {name for name, count in zip(names, counts) if count}


def _listed(classes: list[str]) -> str:
    more = ", ..." if len(classes) > 3 else ""
    return f"{counted(len(classes), 'class')} ({', '.join(classes[:3])}{more})"
