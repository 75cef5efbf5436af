"""Choose the images, labels and classes of an evaluation: other sets of ImageNet's classes, and some classes of any set.

``real``: all labels of the validation images (Beyer et al., 2020); ``v2``: new images, in folders 0 to 999, the numbers of the sorted
synsets (Recht et al., 2019); ``a``, ``r``: 200 classes, of whose scores the best counts (Hendrycks et al., 2021); ``sketch``: drawings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipeline.errors import UserError, first_few, first_line
from pipeline.shards.image_folder import ImageFolder, open_split
from pipeline.shards.shard_set import ShardSet
from pipeline.stores.place import Place, parse_place
from pipeline.stream.samples import DamagedSample, Samples

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Split = ShardSet | ImageFolder
REAL, V2 = "real", "v2"
SETS = {REAL: ("ReaL", 1000), V2: ("V2", 1000), "a": ("A", 200), "r": ("R", 200), "sketch": ("Sketch", 1000)}  # title, classes
_NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})")


class ChosenImages(Samples):
    """Some samples of a split, by their numbers (n,) int64, as a split of its own; ``relabelled``: with (n,) other labels, of classes."""

    def __init__(self, split: Split, indices: np.ndarray, relabelled: tuple[np.ndarray, list[str]] | None = None) -> None:
        self.folder, self.split, self.class_names = split.folder, split.split, split.class_names
        self.samples, self._split, self._indices = self, split, indices
        self._labels = relabelled[0] if relabelled else None
        self.classes = relabelled[1] if relabelled else split.classes

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        """(B,) of ``SAMPLE_DTYPE``."""
        rows = self._split.samples[self._indices[indices]]
        if self._labels is not None:
            rows["label"] = self._labels[indices]
        return rows

    def __len__(self) -> int:
        return len(self._indices)

    def key(self, index: int) -> str:
        return self._split.key(int(self._indices[index]))

    def damaged(self, index: int, reason: str) -> DamagedSample:
        return DamagedSample(int(index), str(self._split.damaged(int(self._indices[index]), reason)))

    def read_batch(self, indices: list[int]) -> list[np.ndarray | DamagedSample]:
        images = self._split.read_batch(self._indices[indices].tolist())
        renumbered = zip(indices, images)  # a damaged sample has its number here
        return [DamagedSample(index, str(image)) if isinstance(image, DamagedSample) else image for index, image in renumbered]


@dataclass(frozen=True)
class EvalSet:
    """What an evaluation compares."""

    title: str
    images: Split | ChosenImages
    outputs: np.ndarray  # (K,) int64: the model's outputs, of which the best counts
    truth: Tensor | None = None  # (images, K) bool: all that is right for an image; None: its label

    def scores(self, model: Callable[[Tensor], Tensor], device: torch.device) -> Callable[[Tensor], Tensor]:
        """The model's scores of the classes that count: (B, 3, H, W) -> (B, K)."""
        import torch

        outputs = torch.from_numpy(self.outputs).to(device)
        return (lambda images: model(images)[:, outputs]) if isinstance(self.images, ChosenImages) else model


def parse_sets(given: Sequence[str]) -> dict[str, Place]:
    """Parse the ``NAME=PLACE`` of each ``--set``. Raises UserError: it has another form."""
    sets: dict[str, Place] = {}
    for text in given:
        name, _, place = text.partition("=")
        if name not in SETS or not place or name in sets:
            problem = f"--set must be NAME=PLACE, each name once, of {', '.join(SETS)}, got {text!r}"
            raise UserError(problem, "write for example --set v2=FOLDER")
        sets[name] = parse_place(place)
    return sets


def read_classes(asked: str, classes: Sequence[str], shown: Sequence[str]) -> np.ndarray:
    """The outputs (K,) of the classes that ``--classes`` names, by identifier or name: a file with one a line, or with commas
    between. Raises UserError: the model has no such class."""
    names = Path(asked).read_text().splitlines() if Path(asked).is_file() else asked.split(",")
    number = {name: output for known in (shown, classes) for output, name in enumerate(known)}
    if unknown := [name for name in names if name.strip() not in number]:
        problem = f"--classes must be classes of the model ({first_few(classes)}), got {first_few(unknown)}"
        raise UserError(problem, "correct them")
    return np.array([number[name.strip()] for name in names])


def open_set(name: str, place: Place, split: str, classes: list[str], val: Split | None, kept: np.ndarray | None) -> EvalSet:
    """Open one of ``SETS``, or, for "", ``val``, whose images are ReaL's too, for a model with these classes, by output.
    ``kept``: (K,) outputs, the only ones that count: images of other classes are left out. None: all. Raises UserError: it
    cannot be read, or is not that set, or the model's classes are not ImageNet's."""
    title, count = SETS.get(name, (str(place), len(classes)))
    order = sorted(range(len(classes)), key=classes.__getitem__)  # what ReaL and V2 number
    if name in (REAL, V2) and len(classes) != count:
        problem = f"{name} numbers the {count:,} classes of ImageNet, but the model has {len(classes)}"
        raise UserError(problem, "leave it out, or evaluate a model of all of them")
    images = val if name in ("", REAL) and val else open_split(place, split, None)
    if len(images.classes) != count:
        problem = f"{images.folder} must have the {count:,} classes of {name}, got {len(images.classes)}"
        raise UserError(problem, "pass all class folders, or shards of them, and name some classes with --classes")
    number = {str(key): output for key, output in (enumerate(order) if name == V2 else zip(classes, range(len(classes))))}
    if unknown := [key for key in images.classes if key not in number]:
        got = f"got {len(unknown)} others ({first_few(unknown)})"
        remedy = f"name the folders as {name} is published, and evaluate a model that was trained on folders named by synsets"
        raise UserError(f"the classes of {images.folder} must be the model's ({first_few(list(number))}), {got}", remedy)
    if name == "" and kept is None:
        return EvalSet(title, images, np.arange(len(classes)))
    outputs = np.array([number[key] for key in images.classes])  # of each class of the set
    counting = np.unique(outputs) if kept is None else np.intersect1d(outputs, kept)
    if not len(counting):
        raise UserError(f"--classes must name classes of {name} too, got none of its {count}", "add one, or leave out the set")
    place_of = np.full(len(classes), -1)
    place_of[counting] = np.arange(len(counting))
    labels, truth = place_of[outputs][images.labels], None  # (n,), -1: of no class that counts
    chosen = labels >= 0
    if name == REAL:
        truth = _real_labels(Path(str(place)), images, order)[:, counting]
        chosen = truth.any(1).numpy()
        truth = truth[chosen]
    numbers = np.flatnonzero(chosen)
    relabelled = np.maximum(labels[numbers], 0), [classes[output] for output in counting]
    return EvalSet(f"ImageNet-{title}" if name else title, ChosenImages(images, numbers, relabelled), counting, truth)


def _real_labels(file: Path, images: Split, order: Sequence[int]) -> Tensor:
    """(images, classes) bool: the labels of each image, by output, found by the number in the file name that it had in the source."""
    found = [_NUMBER.search(name) for name in images.source_names(range(len(images)))]
    if None in found:
        problem = f"real needs the published names, ILSVRC2012_val_00000001 and so on, which {found.count(None)} images of {images.folder} lack"
        remedy = "pass the validation set with these names, or shards of it"
        raise UserError(f"{problem} (first {images.key(found.index(None))})", remedy)
    import torch

    truth = torch.zeros(len(images), len(order), dtype=torch.bool)
    try:
        lists = json.loads(file.read_bytes())
        for row, number in zip(truth, found):
            row[[order[label] for label in lists[int(number[1]) - 1]]] = True  # type: ignore[index]  # none is None
    except (ValueError, TypeError, LookupError) as error:
        problem = f"{file} must hold a list of 50,000 lists of labels below 1,000 ({first_line(error)})"
        raise UserError(problem, "pass real.json of github.com/google-research/reassessed-imagenet") from None
    return truth
