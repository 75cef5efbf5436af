"""Read and check COCO's JSON (Lin et al., "Microsoft COCO", ECCV 2014) before anything is built.

What is wrong with a file is one sentence. What data sets in use do contain has a rule instead, and what a rule leaves out is
counted in a note:

- A box is clipped to its image. If less than 1 pixel is left in width or height, it is not trained on.
- Crowds (``iscrowd`` 1) are not trained on; pycocotools ignores them in an evaluation.
- An image without a box to train on is left out of the training; in an evaluation each detection on it is a false positive.

pycocotools evaluates against the file as it is, so that results are comparable with those of others.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.errors import UserError, first_line
from pipeline.files import open_regular

SMALLEST_SIDE = 1.0  # pixels of a box after clipping; mmdetection's limit
_NAMED = 3  # ids that a note names
_LARGEST = 2**53  # beyond it floats, as pycocotools stores ids, do not tell whole numbers apart
_KEYS = {
    "images": ("id", "file_name", "width", "height"),
    "annotations": ("id", "image_id", "category_id", "bbox", "area", "iscrowd"),
    "categories": ("id", "name"),
}


@dataclass
class Image:
    """An image and what is trained on: n boxes."""

    id: int
    file: Path
    width: int  # pixels
    height: int
    boxes: list[tuple[float, float, float, float]] = field(default_factory=list)  # x1, y1, x2, y2 in pixels, within the image
    labels: list[int] = field(default_factory=list)  # index of the category, from 0
    segmentations: list[Any] = field(default_factory=list)  # polygons or run lengths, as in the file; empty without masks

    def boxes_array(self) -> np.ndarray:
        """(n, 4) float32."""
        return np.array(self.boxes, dtype=np.float32).reshape(-1, 4)


@dataclass
class CocoSet:
    """A checked file.

    Attributes:
        images: all, in order of their ids.
        trained: those with at least one box to train on, likewise.
        category_ids: label -> the file's id; ascending.
        category_names: label -> name.
        notes: a sentence for each rule that left something out.
        tree: the file itself, for pycocotools.
        digest: SHA-256 of the file.
    """

    path: Path
    images: list[Image]
    category_ids: list[int]
    category_names: list[str]
    notes: list[str]
    tree: dict[str, Any]
    digest: str

    @property
    def trained(self) -> list[Image]:
        return [image for image in self.images if image.boxes]


def read_coco(path: Path, folder: Path, masks: bool, key: str) -> CocoSet:
    """Read a COCO JSON file and check all of it, and that its image files are there.

    Args:
        path: the file.
        folder: of the images.
        masks: every annotation needs a segmentation too.
        key: the config key that names the file, for messages.

    Raises:
        UserError: the first mistake found.
    """
    tree, digest = _parse(path, key)
    for part, keys in _KEYS.items():
        _check_entries(path, tree, part, keys)
    categories = sorted(tree["categories"], key=lambda category: category["id"])
    labels = {category["id"]: label for label, category in enumerate(categories)}
    if not labels:
        raise UserError(f"{path}: 'categories' must list at least one, got none", f"correct the file, or set {key} to another")
    images = {entry["id"]: _image(path, entry, folder) for entry in tree["images"]}
    crowds, small = [], []
    for entry in tree["annotations"]:
        where = f"{path}: annotation {entry['id']}"
        image = images.get(entry["image_id"])
        if image is None:
            raise UserError(
                f"{where} is of image {entry['image_id']!r}, which 'images' does not list", "add that image or remove it"
            )
        if entry["category_id"] not in labels:
            known = ", ".join(map(str, list(labels)[:10])) + (", ..." if len(labels) > 10 else "")
            raise UserError(
                f"{where} must be of a category that 'categories' lists ({known}), got {entry['category_id']!r}",
                "add the category or remove the annotation",
            )
        box = _clipped(where, entry["bbox"], image)
        if entry["iscrowd"] not in (0, 1):
            raise UserError(f"{where} must have iscrowd 0 or 1, got {entry['iscrowd']!r}", "correct it")
        shape = _segmentation(where, entry.get("segmentation"), image) if masks else None
        if entry["iscrowd"]:
            crowds.append(entry["id"])
        elif box is None:
            small.append(entry["id"])
        else:
            image.boxes.append(box)
            image.labels.append(labels[entry["category_id"]])
            if masks:
                image.segmentations.append(shape)
    ordered = [images[number] for number in sorted(images)]
    _check_files(ordered, folder, path)
    empty = [image.id for image in ordered if not image.boxes]
    notes = [
        *_note(path, small, "not trained on, boxes outside their image or with a side under 1 pixel within it"),
        *_note(path, crowds, "not trained on, ignored in the evaluation, crowds"),
        *_note(path, empty, "evaluated but not trained on, images without a box to train on"),
    ]
    names = [str(category["name"]) for category in categories]
    return CocoSet(path, ordered, list(labels), names, notes, tree, digest)


def check_same_categories(train: CocoSet, val: CocoSet) -> None:
    """See that both files have the same categories under the same ids.

    Raises:
        UserError: they differ.
    """
    ours, theirs = (dict(zip(each.category_ids, each.category_names)) for each in (train, val))
    different = sorted(number for number in {*ours, *theirs} if ours.get(number) != theirs.get(number))
    if different:
        number = different[0]
        raise UserError(
            f"{val.path} must have the categories of {train.path}, got {theirs.get(number)!r} as category {number} instead of {ours.get(number)!r}",
            "set data.train_annotations and data.val_annotations to files of one data set",
        )


def check_trainable(coco: CocoSet) -> None:
    """See that there is an image to train on.

    Raises:
        UserError: there is none.
    """
    if not coco.trained:
        raise UserError(
            f"{coco.path} must have at least one box to train on, got none", "set data.train_annotations to another file"
        )


def _parse(path: Path, key: str) -> tuple[dict[str, Any], str]:
    try:
        with open(open_regular(path), "rb") as file:
            data = file.read()
    except OSError as error:
        raise UserError(f"{key} {path} cannot be read ({error.strerror})", "correct the key") from None
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({first_line(error)})", f"download it again, or correct {key}") from None
    if not isinstance(tree, dict):
        raise UserError(
            f"{path} must hold an object with images, annotations, categories, got {type(tree).__name__}", f"correct {key}"
        )
    return tree, hashlib.sha256(data).hexdigest()


def _check_entries(path: Path, tree: dict[str, Any], part: str, keys: tuple[str, ...]) -> None:
    """Each entry is an object with these keys and an id of its own."""
    entries = tree.get(part)
    if not isinstance(entries, list):
        raise UserError(
            f"{path}: {part!r} must be a list, got {'none' if part not in tree else type(entries).__name__}",
            "correct the file",
        )
    seen = set()
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise UserError(f"{path}: {part}[{number}] must be an object, got {type(entry).__name__}", "correct the file")
        missing = [name for name in keys if name not in entry]
        if missing:
            named = f" (id {entry['id']!r})" if "id" in entry else ""
            raise UserError(f"{path}: {part}[{number}]{named} must have {', '.join(keys)}, got no {missing[0]!r}", "add it")
        if not _is_number(entry["id"], int):
            raise UserError(f"{path}: {part}[{number}] must have a whole number as id, got {entry['id']!r}", "renumber it")
        if entry["id"] in seen:
            raise UserError(f"{path}: {part} must have distinct ids, got {entry['id']} twice", "renumber them")
        seen.add(entry["id"])


def _image(path: Path, entry: dict[str, Any], folder: Path) -> Image:
    where = f"{path}: image {entry['id']}"
    if not isinstance(entry["file_name"], str) or not entry["file_name"]:
        raise UserError(f"{where} must have the name of a file as file_name, got {entry['file_name']!r}", "correct it")
    for side in ("width", "height"):
        if not _is_number(entry[side], int) or entry[side] < 1:
            raise UserError(f"{where} must have a whole number of pixels as {side}, got {entry[side]!r}", "correct it")
    return Image(entry["id"], folder / entry["file_name"], entry["width"], entry["height"])


def _clipped(where: str, box: Any, image: Image) -> tuple[float, float, float, float] | None:
    """x, y, width, height -> the corners within the image; None if less than ``SMALLEST_SIDE`` is left."""
    if not isinstance(box, list) or len(box) != 4 or not all(_is_number(value, int, float) for value in box):
        raise UserError(f"{where} must have the bbox [x, y, width, height] in pixels, got {box!r:.80}", "correct it")
    x, y, width, height = box
    if width < 0 or height < 0:
        raise UserError(
            f"{where} must have a bbox without negative sides, got {width:g} x {height:g} pixels", "give x, y, width, height"
        )
    left, top = max(0.0, x), max(0.0, y)
    right, bottom = min(float(image.width), x + width), min(float(image.height), y + height)
    return None if right - left < SMALLEST_SIDE or bottom - top < SMALLEST_SIDE else (left, top, right, bottom)


def _segmentation(where: str, found: Any, image: Image) -> Any:
    """Polygons, or run lengths of the image's size."""
    if not found:
        raise UserError(
            f"{where} must have a segmentation for the masks of Mask R-CNN, got none", "add it, or set model.detector=retinanet"
        )
    if isinstance(found, list):
        for polygon in found:
            good = isinstance(polygon, list) and all(_is_number(value, int, float) for value in polygon)
            if not good or len(polygon) < 6 or len(polygon) % 2:
                raise UserError(f"{where} must have polygons of at least three points x, y as segmentation", "correct it")
    elif (
        not isinstance(found, dict)
        or found.get("size") != [image.height, image.width]
        or not isinstance(found.get("counts"), list | str)
    ):
        raise UserError(
            f"{where} must have polygons, or counts with the size [{image.height}, {image.width}], as segmentation, got {str(found)!r:.80}",
            "correct it",
        )
    return found


def _check_files(images: list[Image], folder: Path, path: Path) -> None:
    there: dict[Path, set[str]] = {}  # one listing of a folder is faster than a question for each of its files
    for image in images:
        parent = image.file.parent
        if parent not in there:
            there[parent] = set(os.listdir(parent)) if parent.is_dir() else set()
        if image.file.name not in there[parent]:
            raise UserError(
                f"{image.file} does not exist: {path} lists it as image {image.id}",
                f"restore it, or correct the folder {folder}",
            )


def _note(path: Path, ids: list[int], what: str) -> Iterator[str]:
    if ids:
        yield f"note: {path}: {what}: {len(ids)} (ids {', '.join(map(str, ids[:_NAMED]))}{', ...' if len(ids) > _NAMED else ''})"


def _is_number(value: Any, *kinds: type[int] | type[float]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST  # false for NaN
