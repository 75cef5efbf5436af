"""Small look-alikes of the files that data sets are downloaded as: the same layout, names and quirks, a few images."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat

TRAIN_TAR = "ILSVRC2012_img_train.tar"
VAL_TAR = "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"


def jpeg(number: int, width: int = 40, height: int = 30) -> bytes:
    """A JPEG whose colour depends on ``number``, so that no two images of a test have the same bytes."""
    colour = (number * 37 % 256, number * 91 % 256, number * 13 % 256)
    file = io.BytesIO()
    Image.new("RGB", (width + number % 7, height), colour).save(file, "JPEG", quality=95)
    return file.getvalue()


def write_train_tar(path: Path, images: Mapping[str, Mapping[str, bytes]]) -> Path:
    """Like ``ILSVRC2012_img_train.tar``: a tar of one tar per class.

    Args:
        path: of the outer tar.
        images: wnid to file name to bytes, in the order in which they are to lie in the file.
    """
    with tarfile.open(path, "w") as outer:
        for wnid, class_images in images.items():
            _add(outer, f"{wnid}.tar", tar_bytes(class_images))
    return path


def write_val_tar(path: Path, images: Mapping[str, bytes]) -> Path:
    """Like ``ILSVRC2012_img_val.tar``: all images side by side, without a folder."""
    path.write_bytes(tar_bytes(images))
    return path


def write_devkit(path: Path, wnids: Sequence[str], truth_ids: Iterable[int]) -> Path:
    """Like ``ILSVRC2012_devkit_t12.tar.gz``, as far as labels depend on it.

    Args:
        path: of the archive.
        wnids: of the classes with the ids 1, 2, ...; the real ones are not in alphabetical order either.
        truth_ids: the id of each validation image.
    """
    fields = ("ILSVRC2012_ID", "WNID", "words", "gloss", "num_children", "children", "wordnet_height", "num_train_images")
    # Behind the classes come the inner nodes of the hierarchy, whose ids no image has.
    nodes = [*((wnid, 0) for wnid in wnids), ("n00001740", 2), ("n00002137", len(wnids))]
    synsets = np.zeros((len(nodes), 1), dtype=[(field, object) for field in fields])
    for place, (wnid, children) in enumerate(nodes):
        row = (
            place + 1,
            wnid,
            f"words of {wnid}",
            "gloss",
            children,
            np.arange(1, children + 1),
            0,
            1300 if not children else 0,
        )
        synsets[place, 0] = row
    matlab = io.BytesIO()
    savemat(matlab, {"synsets": synsets})
    truth = "".join(f"{number}\n" for number in truth_ids).encode()
    with tarfile.open(path, "w:gz") as archive:
        _add(archive, "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt", truth)
        _add(archive, "ILSVRC2012_devkit_t12/data/meta.mat", matlab.getvalue())
        _add(archive, "ILSVRC2012_devkit_t12/readme.txt", b"a look-alike\n")
    return path


def write_official_imagenet(folder: Path, images_per_class: int = 6, val_images: int = 8) -> dict[str, list[str]]:
    """Train tar, validation tar and devkit of four classes whose ids do not follow the order of their wnids.

    Returns:
        ``train`` and ``val``: the wnid of each image, in the order of the image's name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wnids = ["n02119789", "n01440764", "n15075141", "n03888257"]  # by id, 1 to 4
    train: dict[str, dict[str, bytes]] = {wnid: {} for wnid in wnids}
    for place, wnid in enumerate(wnids):
        for number in range(images_per_class):
            train[wnid][f"{wnid}_{number * 97 + 18}.JPEG"] = jpeg(100 * place + number)
    truth_ids = [(3 * number) % 4 + 1 for number in range(val_images)]
    val = {f"ILSVRC2012_val_{number + 1:08d}.JPEG": jpeg(1000 + number) for number in range(val_images)}
    write_train_tar(folder / TRAIN_TAR, train)
    write_val_tar(folder / VAL_TAR, dict(reversed(val.items())))  # the order in the file must not matter
    write_devkit(folder / DEVKIT, wnids, truth_ids)
    return {
        "train": [wnid for wnid in sorted(wnids) for _ in range(images_per_class)],
        "val": [wnids[number - 1] for number in truth_ids],
    }


def tar_bytes(members: Mapping[str, bytes]) -> bytes:
    """A tar in memory."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, data in members.items():
            _add(archive, name, data)
    return file.getvalue()


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))
