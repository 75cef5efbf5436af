"""Small look-alikes of the files that data sets are downloaded as: the same layout, names and quirks, a few images."""

from __future__ import annotations

import io
import json
import pickle
import struct
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat

from data_prep.sources import Source

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


def write_cifar10(path: Path, per_batch: int = 6) -> np.ndarray:
    """Like ``cifar-10-python.tar.gz``: five train batches and a test batch of random pixels; image i of all is of class i % 10.

    Returns:
        (6 * per_batch, 32, 32, 3) uint8: the pixels, train first.
    """
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    pixels = np.random.default_rng(0).integers(0, 256, (len(names), per_batch, 3, 32, 32), dtype=np.uint8)
    label_names = b"airplane automobile bird cat deer dog frog horse ship truck".split()
    members = {"batches.meta": {b"label_names": label_names, b"num_vis": 3072}}
    for place, name in enumerate(names):
        numbers = range(place * per_batch, (place + 1) * per_batch)
        members[name] = {
            b"batch_label": name.encode(),
            b"labels": [number % 10 for number in numbers],
            b"data": pixels[place].reshape(per_batch, -1),
            b"filenames": [b"image_s_%06d.png" % number for number in numbers],
        }
    write_pickles(path, "cifar-10-batches-py", members)
    return pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def write_cifar100(path: Path, images: int = 5) -> None:
    """Like ``cifar-100-python.tar.gz``: image i is of the fine class i and, to tell the two apart, of the coarse class 0."""
    members = {"meta": {b"fine_label_names": [b"fine_%02d" % i for i in range(100)], b"coarse_label_names": [b"coarse"] * 20}}
    for name in ("train", "test"):
        members[name] = {
            b"fine_labels": list(range(images)),
            b"coarse_labels": [0] * images,
            b"data": np.zeros((images, 3072), dtype=np.uint8),
            b"filenames": [b"%s_%d.png" % (name.encode(), number) for number in range(images)],
        }
    write_pickles(path, "cifar-100-python", members)


def write_pickles(path: Path, folder: str, members: Mapping[str, object]) -> None:
    """A tar.gz of pickles as Python 2 wrote them: byte strings are ``str`` there, and NumPy's modules have their old names."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            _add(archive, f"{folder}/{name}", _Python2Pickler.dumps(content))


class _Python2Pickler(pickle._Pickler):  # the Python implementation, whose handling of types can be replaced
    dispatch = dict(pickle._Pickler.dispatch)

    def _save_string(self, text: bytes | str) -> None:
        data = text if isinstance(text, bytes) else text.encode("latin-1")
        self.write(pickle.BINSTRING + struct.pack("<i", len(data)) + data)
        self.memoize(text)

    dispatch[bytes] = dispatch[str] = _save_string

    @classmethod
    def dumps(cls, content: object) -> bytes:
        file = io.BytesIO()
        cls(file, protocol=2).dump(content)
        return file.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def write_inaturalist(folder: Path) -> None:
    """Like iNaturalist 2019: nested folders; three categories whose order by id is not the one by name."""
    categories = [{"id": 2, "name": "Abies alba"}, {"id": 0, "name": "Parus major"}, {"id": 1, "name": "Bombus terrestris"}]
    for split, ids in (("train", (0, 1, 2, 2, 1)), ("val", (2, 0))):
        images = []
        for number, category in enumerate(ids):
            file_name = f"train_val2019/Kingdom/{category}/{split}{number}.jpg"
            (folder / file_name).parent.mkdir(parents=True, exist_ok=True)
            (folder / file_name).write_bytes(jpeg(number + 50 * category))
            images.append({"id": 700 - number, "file_name": file_name, "width": 40, "height": 30})
        annotations = [{"id": n, "image_id": 700 - n, "category_id": category} for n, category in enumerate(ids)]
        tree = {"info": {}, "images": images, "annotations": annotations, "categories": categories}
        (folder / f"{split}2019.json").write_text(json.dumps(tree))


def class_of_each_file(source: Source) -> dict[str, str]:
    """File name to class name, by reading every image."""
    images = [source.read(sample) for sample in range(len(source))]
    assert [image.class_name for image in images] == [source.class_names[label] for label in source.labels]
    return {image.name.rpartition("/")[2]: image.class_name for image in images}


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
