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
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict

from pipeline.errors import UserError, first_few, first_invalid
from pipeline.files import open_regular

SMALLEST_SIDE = 1.0  # pixels of a box after clipping; mmdetection's limit
_LARGEST = 2**53  # beyond it floats, as pycocotools stores ids, do not tell whole numbers apart

_Id = Annotated[int, Field(strict=True, gt=-_LARGEST, lt=_LARGEST)]
_Pixels = Annotated[int, Field(strict=True, ge=1, lt=_LARGEST)]
_Number = Annotated[float, Field(strict=True, gt=-_LARGEST, lt=_LARGEST, allow_inf_nan=False)]
_Side = Annotated[float, Field(strict=True, ge=0, lt=_LARGEST, allow_inf_nan=False)]
_Polygon = Annotated[list[_Number], Field(min_length=6)]  # x, y of at least three points
_Box = tuple[float, float, float, float]


class _ImageEntry(TypedDict):
    id: _Id
    file_name: Annotated[str, Field(min_length=1)]
    width: _Pixels
    height: _Pixels


class _Annotation(TypedDict):
    id: _Id
    image_id: _Id
    category_id: _Id
    bbox: tuple[_Number, _Number, _Side, _Side]  # x, y, width, height in pixels
    area: _Number
    iscrowd: Literal[0, 1]
    segmentation: NotRequired[Any]


class _Category(TypedDict):
    id: _Id
    name: str


class _Tree(TypedDict):
    images: list[_ImageEntry]
    annotations: list[_Annotation]
    categories: Annotated[list[_Category], Field(min_length=1)]


@dataclass
class Image:
    """An image and what is trained on: n boxes."""

    id: int
    file: Path
    width: int  # pixels
    height: int
    boxes: list[_Box] = field(default_factory=list)  # x1, y1, x2, y2 in pixels, within the image
    labels: list[int] = field(default_factory=list)  # index of the category, from 0
    segmentations: list[Any] = field(default_factory=list)  # polygons or run lengths, as in the file; empty without masks


@dataclass
class CocoSet:
    """A checked file."""

    path: Path
    images: list[Image]  # all, in order of their ids
    category_ids: list[int]  # label -> the file's id; ascending
    category_names: list[str]  # label -> name
    notes: list[str]  # a sentence for each rule that left something out
    digest: str  # SHA-256 of the file

    @property
    def trained(self) -> list[Image]:
        """The images with at least one box to train on."""
        return [image for image in self.images if image.boxes]


def read_coco(path: Path, folder: Path, masks: bool, key: str) -> CocoSet:
    """Read a COCO JSON file and check all of it, and that its image files are there.

    Args:
        folder: of the images.
        masks: every annotation needs a segmentation too.
        key: the config key that names the file, for messages.

    Raises:
        UserError: the first mistake found.
    """
    try:
        with open(open_regular(path), "rb") as file:
            content = file.read()
        tree = TypeAdapter(_Tree).validate_json(content)
    except OSError as error:
        raise UserError(f"{key} {path} cannot be read ({error.strerror})", "correct the key") from None
    except ValidationError as error:
        raise UserError(f"{path}: {first_invalid(error)}", f"correct the file, or {key}") from None
    for part in tree:
        ids = [entry["id"] for entry in tree[part]]  # type: ignore[literal-required]
        if len(set(ids)) < len(ids):
            raise UserError(f"{path}: {part} must have distinct ids, got {_repeated(ids)} twice", "renumber them")
    categories = sorted(tree["categories"], key=lambda category: category["id"])
    labels = {category["id"]: label for label, category in enumerate(categories)}
    sizes = {entry["id"]: (entry["width"], entry["height"]) for entry in tree["images"]}
    images = {entry["id"]: Image(entry["id"], folder / entry["file_name"], *sizes[entry["id"]]) for entry in tree["images"]}
    crowds, small = [], []
    for entry in tree["annotations"]:
        where, number, category = f"{path}: annotation {entry['id']}", entry["image_id"], entry["category_id"]
        if number not in images:
            raise UserError(f"{where} is of image {number}, which 'images' does not list", "add that image or remove it")
        if category not in labels:
            known = first_few([str(each) for each in labels], most=10)
            problem = f"{where} must be of a category that 'categories' lists ({known}), got {category}"
            raise UserError(problem, "add the category or remove the annotation")
        shape = _segmentation(where, entry.get("segmentation"), images[number]) if masks else None
        box = _clipped(entry["bbox"], images[number])
        if entry["iscrowd"]:
            crowds.append(entry["id"])
        elif box is None:
            small.append(entry["id"])
        else:
            images[number].boxes.append(box)
            images[number].labels.append(labels[category])
            images[number].segmentations += [shape] if masks else []
    ordered = [images[number] for number in sorted(images)]
    _check_files(ordered, folder, path)
    notes = [
        *_note(path, small, "not trained on, boxes outside their image or with a side under 1 pixel within it"),
        *_note(path, crowds, "not trained on, ignored in the evaluation, crowds"),
        *_note(
            path,
            [each.id for each in ordered if not each.boxes],
            "evaluated but not trained on, images without a box to train on",
        ),
    ]
    names = [category["name"] for category in categories]
    return CocoSet(path, ordered, list(labels), names, notes, hashlib.sha256(content).hexdigest())


def check_sets(train: CocoSet, val: CocoSet) -> None:
    """See that there is something to train on, and that both files have the same categories under the same ids. Raises UserError."""
    if not train.trained:
        problem = f"{train.path} must have at least one box to train on, got none"
        raise UserError(problem, "set data.train_annotations to another file")
    ours, theirs = (dict(zip(each.category_ids, each.category_names)) for each in (train, val))
    for number in sorted(ours.keys() | theirs.keys()):
        if ours.get(number) != theirs.get(number):
            found = f"{theirs.get(number)!r} as category {number} instead of {ours.get(number)!r}"
            raise UserError(
                f"{val.path} must have the categories of {train.path}, got {found}",
                "set data.train_annotations and data.val_annotations to files of one data set",
            )


def _repeated(ids: list[int]) -> int:
    seen: set[int] = set()
    return next(number for number in ids if number in seen or seen.add(number))  # type: ignore[func-returns-value]


def _clipped(box: _Box, image: Image) -> _Box | None:
    """x, y, width, height -> the corners within the image; None if less than ``SMALLEST_SIDE`` is left."""
    x, y, width, height = box
    left, top = max(0.0, x), max(0.0, y)
    right, bottom = min(float(image.width), x + width), min(float(image.height), y + height)
    return None if right - left < SMALLEST_SIDE or bottom - top < SMALLEST_SIDE else (left, top, right, bottom)


def _segmentation(where: str, found: Any, image: Image) -> Any:
    """Polygons, or run lengths of the image's size."""
    if not found:
        problem = f"{where} must have a segmentation for the masks of Mask R-CNN, got none"
        raise UserError(problem, "add it, or set model.detector=retinanet")
    size = [image.height, image.width]
    if isinstance(found, dict):
        good = found.get("size") == size and isinstance(found.get("counts"), list | str)
    else:
        good = _are_polygons(found)
    if not good:
        need = f"polygons of at least three points x, y, or counts with the size {size}"
        raise UserError(f"{where} must have {need}, as segmentation, got {found!s:.80}", "correct it")
    return found


def _are_polygons(found: Any) -> bool:
    try:
        return all(len(polygon) % 2 == 0 for polygon in _POLYGONS.validate_python(found))
    except ValidationError:
        return False


_POLYGONS = TypeAdapter(list[_Polygon])


def _check_files(images: list[Image], folder: Path, path: Path) -> None:
    there: dict[Path, set[str]] = {}  # one listing of a folder is faster than a question for each of its files
    for image in images:
        parent = image.file.parent
        if parent not in there:
            there[parent] = set(os.listdir(parent)) if parent.is_dir() else set()
        if image.file.name not in there[parent]:
            problem = f"{image.file} does not exist: {path} lists it as image {image.id}"
            raise UserError(problem, f"restore it, or correct the folder {folder}")


def _note(path: Path, ids: list[int], what: str) -> Iterator[str]:
    if ids:
        yield f"note: {path}: {what}: {len(ids)} (ids {first_few([str(number) for number in ids])})"
