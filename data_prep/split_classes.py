"""Do the splits of a data set show the same classes, in other images? A model cannot learn one that only the val split has."""

from __future__ import annotations

from collections.abc import Mapping, Set

from data_prep import counted
from pipeline.data.manifest import SplitInfo


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


def same_images(splits: Mapping[str, SplitInfo], split: str, fingerprint: str) -> str:
    """What is odd when another split was written from the same images; empty when none was.

    Args:
        splits: of the shard set's manifest.
        split: the one that is looked at; it need not be among them yet.
        fingerprint: of the images that it is written from.
    """
    for name, info in splits.items():
        if name != split and info.source["fingerprint"] == fingerprint:
            return f"the {split} split has the images of its {name} split: what is measured on them says nothing about new ones"
    return ""


def classes_with_images(names: list[str], counts: list[int]) -> set[str]:
    """The names whose count is above 0."""
    return {name for name, count in zip(names, counts) if count}


def _listed(classes: list[str]) -> str:
    more = ", ..." if len(classes) > 3 else ""
    return f"{counted(len(classes), 'class')} ({', '.join(classes[:3])}{more})"
