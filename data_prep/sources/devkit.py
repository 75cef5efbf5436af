"""Read ``ILSVRC2012_devkit_t12.tar.gz``, the labels of ImageNet's validation images.

The ground truth gives each image an ``ILSVRC2012_ID`` from 1 to 1000, ``meta.mat`` maps ids to wnids. Neither is the class
index that models are trained with, which is the wnid's position in alphabetical order.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np

from data_prep.sources.base import read_tar_gz
from pipeline.errors import UserError

DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
_META = "data/meta.mat"
_TRUTH = "data/ILSVRC2012_validation_ground_truth.txt"
_DOWNLOAD = f"download {DEVKIT} again"


class Devkit:
    """The labels of the validation images.

    Args:
        path: the archive.

    Attributes:
        wnids: of the ids 1, 2, ..., in this order.
        words: wnid -> the synset's words, such as ``tench, Tinca tinca``; empty if the devkit has none.
        truth: id of each validation image, in the order of the images' numbers.

    Raises:
        UserError: missing, damaged, or inconsistent ids.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        members = _read_members(path, (_META, _TRUTH))
        self.wnids, self.words = _synsets(members[_META], path)
        self.truth = _truth(members[_TRUTH], len(self.wnids), path)

    def wnid(self, number: int) -> str:
        """The class of the image ``ILSVRC2012_val_<number>.JPEG``; numbers start at 1.

        Raises:
            UserError: no such image.
        """
        if not 1 <= number <= len(self.truth):
            raise UserError(
                f"{self.path} must have the ground truth of ILSVRC2012_val_{number:08d}.JPEG, got that of {len(self.truth)} images",
                _DOWNLOAD,
            )
        return self.wnids[self.truth[number - 1] - 1]


def _read_members(path: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    """The members whose paths end with these names."""
    try:
        found = read_tar_gz(path, lambda member: next(filter(member.endswith, names), None), "the devkit", _DOWNLOAD)
    except FileNotFoundError:
        raise UserError(
            f"{path}, with the labels of ImageNet's val split, is missing", "put it there or pass --devkit PATH"
        ) from None
    for name in names:
        if name not in found:
            raise UserError(f"{path} must have the member {name}", _DOWNLOAD)
    return found


def _synsets(data: bytes, path: Path) -> tuple[list[str], dict[str, str]]:
    """The wnids by id and their words, from ``meta.mat``: the nodes without children of the struct array ``synsets``."""
    from scipy.io import loadmat  # imported late: takes half a second, and no other source needs it

    try:
        synsets = np.atleast_1d(loadmat(io.BytesIO(data), squeeze_me=True)["synsets"])  # (nodes,) of structs
        leaves = [node for node in synsets if int(node["num_children"]) == 0]
        classes = {int(node["ILSVRC2012_ID"]): str(node["WNID"]) for node in leaves}
        named = "words" in (synsets.dtype.names or ())
        words = {str(node["WNID"]): str(node["words"]).strip() for node in leaves} if named else {}
    except Exception as error:  # SciPy's parser can raise nearly any exception on a damaged file
        raise UserError(f"{path}: {_META} must have the struct array 'synsets', got {error!r}", _DOWNLOAD) from None
    if sorted(classes) != list(range(1, len(classes) + 1)):
        raise UserError(
            f"{path}: the ids of {_META} must be 1 to {len(classes)}, got {min(classes, default=0)} to {max(classes, default=0)} for "
            f"{len(classes)} classes",
            _DOWNLOAD,
        )
    if unprintable := [wnid for wnid, text in words.items() if not text or not text.isprintable()]:
        raise UserError(
            f"{path}: {_META} has no words for {len(unprintable)} of {len(classes)} classes ({unprintable[0]})", _DOWNLOAD
        )
    return [classes[number] for number in sorted(classes)], words


def _truth(data: bytes, classes: int, path: Path) -> list[int]:
    """Parse the ground truth: one id per line."""
    lines = data.decode(errors="replace").split()
    for number, line in enumerate(lines, start=1):
        if not (re.fullmatch("[0-9]{1,9}", line) and 1 <= int(line) <= classes):
            raise UserError(f"{path}: line {number} of {_TRUTH} must be an id from 1 to {classes}, got {line!r:.60}", _DOWNLOAD)
    return [int(line) for line in lines]
