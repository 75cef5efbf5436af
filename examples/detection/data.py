"""Read COCO's JSON (Lin et al., "Microsoft COCO", ECCV 2014), all of it checked before anything is built, and load its images.

What is wrong with a file is one sentence. What data sets in use do contain has a rule instead, and what a rule leaves out is
counted in a note:

- A box is clipped to its image. If less than 1 pixel is left in width or height, it is not trained on.
- Crowds (``iscrowd`` 1) are not trained on; pycocotools ignores them in an evaluation.
- An image without a box to train on is left out of the training; in an evaluation each detection on it is a false positive.

pycocotools evaluates against the file as it is, so that results are comparable with those of others.

The images of a run form one sequence: position p of epoch e is sample ``sample_at(p, e)``, epochs follow each other without a
gap, and step s takes places s * G to (s + 1) * G - 1, where G is the global batch size. So images, flips and draws are
functions of (seed, epoch, position), whatever the number of processes. Resizing is the model's part, on its device.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import PIL.Image
import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from examples.detection.config import DetectionConfig
from pipeline.cluster.world import World
from pipeline.errors import UserError, first_few, first_invalid
from pipeline.files import open_regular
from pipeline.stream.order import sample_at
from pipeline.stream.philox import Stream, random_words

SMALLEST_SIDE = 1.0  # pixels of a box after clipping; mmdetection's limit
_LARGEST = 2**53  # beyond it floats, as pycocotools stores ids, do not tell whole numbers apart

_Id = Annotated[int, Field(strict=True, gt=-_LARGEST, lt=_LARGEST)]
_Pixels = Annotated[int, Field(strict=True, ge=1, lt=_LARGEST)]
_Number = Annotated[float, Field(strict=True, gt=-_LARGEST, lt=_LARGEST, allow_inf_nan=False)]
_Side = Annotated[float, Field(strict=True, ge=0, lt=_LARGEST, allow_inf_nan=False)]
Target = dict[str, Tensor]  # boxes (n, 4) float32 x1 y1 x2 y2, labels (n,) int64, with masks: masks (n, H, W) uint8
_READ_AHEAD = 4  # micro-batches that are decoded before they are asked for


@dataclass
class Image:
    """An image of the file, and what is trained on: n boxes."""

    id: _Id
    file_name: Annotated[str, Field(min_length=1)]
    width: _Pixels
    height: _Pixels
    file: Path = field(init=False)
    boxes: list[Sequence[float]] = field(init=False, default_factory=list)  # x1, y1, x2, y2 in pixels, within the image
    labels: list[int] = field(init=False, default_factory=list)  # index of the category, from 0
    segmentations: list[Any] = field(init=False, default_factory=list)  # polygons or run lengths; empty without masks


@dataclass
class _Annotation:
    id: _Id
    image_id: _Id
    category_id: _Id
    bbox: tuple[_Number, _Number, _Side, _Side]  # x, y, width, height in pixels
    area: _Number
    iscrowd: Literal[0, 1]
    segmentation: list[list[_Number]] | dict[str, Any] | None = None


@dataclass
class _Category:
    id: _Id
    name: str


@dataclass
class _Tree:
    images: list[Image]
    annotations: list[_Annotation]
    categories: Annotated[list[_Category], Field(min_length=1)]


@dataclass
class CocoSet:
    """A checked file."""

    path: Path
    images: list[Image]  # all, in order of their ids
    categories: dict[int, str]  # the file's id -> name, in ascending order: the first is label 0
    notes: list[str]  # a sentence for each rule that left something out
    digest: str  # SHA-256 of the file

    @property
    def trained(self) -> list[Image]:
        """The images with at least one box to train on."""
        return [image for image in self.images if image.boxes]


def read_coco(path: Path, folder: Path, masks: bool, key: str) -> CocoSet:
    """Read a COCO JSON file and check all of it, and that its image files are in ``folder``; with ``masks``, every annotation
    needs a segmentation too. Raises UserError: the first mistake found; ``key`` is the one of the config that names the file."""
    try:
        with open(open_regular(path), "rb") as file:
            content = file.read()
        tree = TypeAdapter(_Tree).validate_json(content)
    except OSError as error:
        raise UserError(f"{key} {path} cannot be read ({error.strerror})", "correct the key") from None
    except ValidationError as error:
        raise UserError(f"{path}: {first_invalid(error)}", f"correct the file, or {key}") from None
    for part, entries in vars(tree).items():
        if twice := [number for number, times in Counter(entry.id for entry in entries).items() if times > 1]:
            raise UserError(f"{path}: {part} must have distinct ids, got {twice[0]} twice", "renumber them")
    categories = dict(sorted((category.id, category.name) for category in tree.categories))
    labels = {number: label for label, number in enumerate(categories)}
    images = {image.id: image for image in sorted(tree.images, key=lambda image: image.id)}
    for image in images.values():
        image.file = folder / image.file_name
    folders = {image.file.parent for image in images.values()}  # a listing is faster than a question for each of its files
    there = {file for each in folders if each.is_dir() for file in each.iterdir()}
    if lost := next((image for image in images.values() if image.file not in there), None):
        problem = f"{lost.file} does not exist: {path} lists it as image {lost.id}"
        raise UserError(problem, f"restore it, or correct the folder {folder}")
    crowds, small = [], []
    for entry in tree.annotations:
        where = f"{path}: annotation {entry.id}"
        if entry.image_id not in images:
            problem = f"{where} is of image {entry.image_id}, which 'images' does not list"
            raise UserError(problem, "add that image or remove it")
        if entry.category_id not in labels:
            known = first_few([str(number) for number in labels], most=10)
            problem = f"{where} must be of a category that 'categories' lists ({known}), got {entry.category_id}"
            raise UserError(problem, "add the category or remove the annotation")
        image = images[entry.image_id]
        if masks:
            _check_segmentation(where, entry.segmentation, image)
        x, y, width, height = entry.bbox
        left, top, right, bottom = max(0.0, x), max(0.0, y), min(image.width, x + width), min(image.height, y + height)
        if entry.iscrowd:
            crowds.append(entry.id)
        elif min(right - left, bottom - top) < SMALLEST_SIDE:
            small.append(entry.id)
        else:
            image.boxes.append((left, top, right, bottom))
            image.labels.append(labels[entry.category_id])
            image.segmentations += [entry.segmentation] if masks else []
    left_out = {
        "not trained on, boxes outside their image or with a side under 1 pixel within it": small,
        "not trained on, ignored in the evaluation, crowds": crowds,
        "evaluated but not trained on, images without a box to train on": [i for i, image in images.items() if not image.boxes],
    }
    notes = [f"note: {path}: {why}: {len(ids)} (ids {first_few(list(map(str, ids)))})" for why, ids in left_out.items() if ids]
    return CocoSet(path, list(images.values()), categories, notes, hashlib.sha256(content).hexdigest())


def check_sets(train: CocoSet, val: CocoSet) -> None:
    """See that there is something to train on, and that both files have the same categories and ids. Raises UserError."""
    if not train.trained:
        problem = f"{train.path} must have at least one box to train on, got none"
        raise UserError(problem, "set data.train_annotations to another file")
    ours, theirs = train.categories, val.categories
    if differing := [number for number, _ in ours.items() ^ theirs.items()]:
        found = f"{theirs.get(min(differing))!r} as category {min(differing)} instead of {ours.get(min(differing))!r}"
        remedy = "set data.train_annotations and data.val_annotations to files of one data set"
        raise UserError(f"{val.path} must have the categories of {train.path}, got {found}", remedy)


def _check_segmentation(where: str, found: list | dict | None, image: Image) -> None:
    """It is polygons, or run lengths of the image's size."""
    if not found:
        problem = f"{where} must have a segmentation for the masks of Mask R-CNN, got none"
        raise UserError(problem, "add it, or set model.detector=retinanet")
    size = [image.height, image.width]
    runs = isinstance(found, dict) and found.get("size") == size and isinstance(found.get("counts"), list | str)
    if not runs and not (isinstance(found, list) and all(len(part) >= 6 and len(part) % 2 == 0 for part in found)):
        need = f"polygons of at least three points x, y, or counts with the size {size}"
        raise UserError(f"{where} must have {need}, as segmentation, got {found!s:.80}", "correct it")


@dataclass(frozen=True)
class Request:
    """A micro-batch of B images."""

    epoch: np.ndarray  # (B,) int64
    position: np.ndarray  # (B,) int64, in the epoch
    sample: np.ndarray  # (B,) int64, index into the images to train on
    flip: np.ndarray  # (B,) bool
    torch_seed: np.ndarray  # (B,) int64: of the generator that draws the anchors and proposals which count


def request(config: DetectionConfig, images: int, step: int, part: int, parts: int) -> Request:
    """Micro-batch ``part``, accumulation * ranks + rank, of the ``parts`` of all ranks that make the step after ``step`` others,
    of a number of ``images``."""
    size = config.train.global_batch_size // parts
    place = step * config.train.global_batch_size + part * size + np.arange(size)  # (B,)
    epoch, position = np.divmod(place, images)
    words = random_words(Stream.CROP_AND_FLIP, config.seed, epoch, position, 2)  # below 2**32
    sample, flip = sample_at(position, epoch, images, config.seed), words[:, 0] * 2.0**-32 < config.data.flip
    return Request(epoch, position, sample, flip, torch_seed=words[:, 1].astype(np.int64))


@dataclass
class Batch:
    """B images, each of its own size, on a device; the rest is for training. The package's training step gives a model the
    ``images`` of a batch: a detector takes all of it."""

    pixels: list[Tensor]  # (3, H, W) float32 in [0, 1]
    targets: list[Target] | None = None
    request: Request | None = None
    replaced: int = 0  # images: one that cannot be read ends the run

    @property
    def images(self) -> Batch:
        return self

    @property
    def device(self) -> torch.device:
        return self.pixels[0].device


def batches(config: DetectionConfig, images: list[Image], world: World, step: int, accumulation: int) -> Generator[Batch]:
    """This rank's micro-batches of ``images``, ``accumulation`` for each step after ``step`` others, without an end; an error of
    a file is raised where its batch is due. Close it: threads decode ahead."""

    def load(number: int, flip: bool) -> tuple[Tensor, Target]:
        loaded = read_image(images[number]), read_target(images[number], config.has_masks)
        return mirrored(*loaded) if flip else loaded

    parts = accumulation * world.size
    pool = ThreadPoolExecutor(config.data.num_threads or world.cpu_threads, thread_name_prefix="decode")
    waiting: deque[tuple[Request, Iterator[tuple[Tensor, Target]]]] = deque()
    try:
        for part in count(step * parts + world.rank, world.size):
            coming = request(config, len(images), *divmod(part, parts), parts)
            waiting.append((coming, pool.map(load, coming.sample, coming.flip)))
            if len(waiting) > _READ_AHEAD:
                due, loaded = waiting.popleft()
                pixels, targets = zip(*loaded)
                moved = [{name: value.to(world.device) for name, value in target.items()} for target in targets]
                yield Batch([image.to(world.device) for image in pixels], moved, due)
    finally:
        pool.shutdown(cancel_futures=True)


def read_image(image: Image) -> Tensor:
    """Decode an image: (3, H, W) float32 in [0, 1]. EXIF orientation is ignored, as COCO's boxes do. Raises UserError: the file
    cannot be decoded, or has another size than its COCO file says."""
    try:
        with PIL.Image.open(image.file) as opened:
            pixels = np.array(opened.convert("RGB"))  # (H, W, 3)
    except (OSError, SyntaxError, ValueError, PIL.Image.DecompressionBombError) as error:  # SyntaxError: of Pillow's PNG reader
        raise UserError(f"{image.file} cannot be decoded ({error})", "restore it") from None
    if opened.size != (image.width, image.height):
        need, got = f"{image.width}x{image.height} pixels, as its COCO file says", "{}x{}".format(*opened.size)
        raise UserError(f"{image.file} must have {need}, got {got}", "restore the file or correct its width and height")
    return torch.from_numpy(pixels).permute(2, 0, 1).float().div_(255)


def read_target(image: Image, masks: bool) -> Target:
    """What is trained on; with ``masks`` the segmentations too, and label 0 is the background."""
    boxes = torch.tensor(image.boxes, dtype=torch.float32).reshape(-1, 4)
    target = {"boxes": boxes, "labels": torch.tensor(image.labels, dtype=torch.int64) + masks}
    if masks:
        drawn = [draw_mask(segmentation, image.height, image.width) for segmentation in image.segmentations]
        target["masks"] = torch.from_numpy(np.stack(drawn))  # (n, H, W)
    return target


def draw_mask(segmentation: list | dict, height: int, width: int) -> np.ndarray:
    """Polygons or run lengths as (H, W) uint8, 1 within."""
    from pycocotools import mask

    compressed = isinstance(segmentation, dict) and isinstance(segmentation["counts"], str)
    encoded = segmentation if compressed else mask.frPyObjects(segmentation, height, width)
    return mask.decode(mask.merge(encoded) if isinstance(encoded, list) else encoded)


def mirrored(image: Tensor, target: Target) -> tuple[Tensor, Target]:
    """An image (3, H, W) and its target, flipped horizontally."""
    width, (x1, y1, x2, y2) = image.shape[-1], target["boxes"].unbind(1)
    masks = {"masks": target["masks"].flip(-1)} if "masks" in target else {}
    return image.flip(-1), {**target, **masks, "boxes": torch.stack([width - x2, y1, width - x1, y2], dim=1)}
