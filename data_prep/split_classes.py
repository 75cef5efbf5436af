"""Checks on the splits of a data set: the same classes in both, and different images."""

from __future__ import annotations

from collections.abc import Mapping, Set

from data_prep import counted
from pipeline.data.manifest import SplitInfo


def untaught_classes(train: Set[str], val: Set[str]) -> str:
    """Describe the classes of val that train has no images of; empty if there are none.

    Args:
        train: classes with images in the train split.
        val: classes with images in the val split.
    """
    foreign = sorted(val - train)
    return f"val has images of {_listed(foreign)} that train has none of" if foreign else ""


def unseen_classes(train: Set[str], val: Set[str]) -> str:
    """Describe the classes of train that val has no images of; empty if there are none."""
    unseen = sorted(train - val)
    return f"val has no images of {_listed(unseen)} that train has, so accuracy says nothing about them" if unseen else ""


def same_images(splits: Mapping[str, SplitInfo], split: str, fingerprint: str) -> str:
    """Warn of another split that was written from the same images; empty if there is none.

    Args:
        splits: those in the shard set's manifest.
        split: the split to compare with the others; need not be in the manifest yet.
        fingerprint: of its source.
    """
    for name, info in splits.items():
        if name != split and info.source["fingerprint"] == fingerprint:
            return f"the {split} split has the images of its {name} split: accuracy on them says nothing about unseen images"
    return ""


def classes_with_images(names: list[str], counts: list[int]) -> set[str]:
    """The names of the classes with a count above 0."""
    return {name for name, count in zip(names, counts) if count}


def _listed(classes: list[str]) -> str:
    more = ", ..." if len(classes) > 3 else ""
    return f"{counted(len(classes), 'class')} ({', '.join(classes[:3])}{more})"
