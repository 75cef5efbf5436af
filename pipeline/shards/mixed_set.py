"""Read several shard sets as one training split: ``data.path`` and those of ``data.mix``, with their classes matched by name."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from pipeline.errors import UserError, first_few
from pipeline.shards.files.cache import ShardCache
from pipeline.shards.manifest import SAMPLE_DTYPE
from pipeline.shards.shard_set import ShardSet
from pipeline.stream.samples import DamagedSample, Mixture, Samples

_DIGITS = 32  # of a set's digest in the identity


class MixedSet(Samples):
    """Samples of several sets, numbered one set after another; an epoch may show more of them or fewer.

    A class of a further set is the class of the first set with the same identifier or, failing that, the same readable name.
    Raises UserError: a set has a class that the first one lacks.

    Args:
        first: its classes are those of the model; its images have weight 1.
        further: set -> weight: how often an epoch shows each of its images, on average.
    """

    def __init__(self, first: ShardSet, further: Mapping[ShardSet, float]) -> None:
        self.sets = [first, *further]
        self.folder, self.split, self.subset = first.folder, first.split, first.subset
        self.classes, self.named, self.class_names = first.classes, first.named, first.class_names
        self.mixture = Mixture(tuple(map(len, self.sets)), (1.0, *further.values()))
        self._starts = self.mixture.first_sample
        self.samples, self._labels = self, [_labels(shards, first) for shards in self.sets]

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        """(B,) sample numbers -> (B,) of ``SAMPLE_DTYPE``, with labels of the first set."""
        rows = np.empty(len(indices), SAMPLE_DTYPE)
        which = np.searchsorted(self._starts, indices, side="right") - 1
        for number in np.unique(which).tolist():
            own = which == number
            rows[own] = self.sets[number].samples[indices[own] - self._starts[number]]
            rows["label"][own] = self._labels[number][rows["label"][own]]
        return rows

    def identity(self) -> dict:
        """That of the first set, with the images of an epoch, and a digest of each further set with its weight."""
        assert self.mixture is not None
        digests = [hashlib.sha256(json.dumps(shards.identity(), sort_keys=True).encode()).hexdigest() for shards in self.sets]
        mix = [f"{weight:g} x {digest[:_DIGITS]}" for weight, digest in zip(self.mixture.weights[1:], digests[1:])]
        return {**self.sets[0].identity(), "samples": self.mixture.images, "mix": mix}

    def key(self, index: int) -> str:
        """The WebDataset key, and the folder of a further set."""
        shards, own = self._find(index)
        return shards.key(own) if shards is self.sets[0] else f"{shards.key(own)} of {shards.folder}"

    def read_batch(self, indices: list[int]) -> list[np.ndarray | DamagedSample]:
        """Each set's store is asked for its samples at the same time."""
        images: list[np.ndarray | DamagedSample] = [np.empty(0, np.uint8)] * len(indices)
        found = [self._find(index) for index in indices]
        for shards in dict.fromkeys(shards for shards, _ in found):
            places = [place for place, (its, _) in enumerate(found) if its is shards]
            for place, image in zip(places, shards.read_batch([found[place][1] for place in places])):
                images[place] = DamagedSample(indices[place], str(image)) if isinstance(image, DamagedSample) else image
        return images

    def will_need(self, runs: list[tuple[int, int]]) -> None:
        """No run spans two sets."""
        found = [(*self._find(first), count) for first, count in runs]
        for shards in dict.fromkeys(shards for shards, _, _ in found):
            shards.will_need([(begin, count) for its, begin, count in found if its is shards])

    def take_counts(self) -> dict[str, int] | None:
        counts = [found for shards in self.sets if (found := shards.take_counts()) is not None]
        return dict(sum(map(Counter, counts), Counter[str]())) if counts else None

    def damaged(self, index: int, reason: str) -> DamagedSample:
        shards, own = self._find(index)
        return DamagedSample(int(index), str(shards.damaged(own, reason)))

    def _find(self, index: int) -> tuple[ShardSet, int]:
        which = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self.sets[which], int(index - self._starts[which])


def of_mix(error: UserError) -> UserError:
    """The error of a shard set, for one that ``data.mix`` names."""
    return UserError(f"data.mix: {error}".replace("data.path", "data.mix"))


def open_training_set(
    path: str | os.PathLike[str], mix: Mapping[str, float], readers: int = 1, *, cache: ShardCache | None = None
) -> ShardSet | MixedSet:
    """Open the training split of ``data.path``, with those of ``data.mix``, each path with its weight, if there are any. Raises
    UserError: a set cannot be opened (the message names its key), or has a class that ``data.path`` lacks."""
    first = ShardSet(path, "train", readers, cache=cache)
    if not mix:
        return first
    further = {}
    places = {_place(first): os.fspath(path)}
    for folder, weight in mix.items():
        try:
            shards = ShardSet(folder, "train", readers, cache=cache)
        except UserError as error:
            raise of_mix(error) from None
        if (other := places.setdefault(_place(shards), folder)) is not folder:
            problem = f"data.mix must name different sets, got {folder} and {other}, which are the same place"
            raise UserError(problem, "remove one of them")
        further[shards] = weight
    return MixedSet(first, further)


def _place(shards: ShardSet) -> str:
    """One spelling of a set's path, however the user spelled it; a URL has one spelling."""
    return os.path.realpath(shards.folder) if isinstance(shards.folder, Path) else str(shards.folder)


def _labels(shards: ShardSet, first: ShardSet) -> np.ndarray:
    """(classes of the set,) int64: the label of each in the first set."""
    number = {name: label for label, name in enumerate(first.classes)}
    spoken = {name: label for label, name in enumerate(first.class_names)}
    if len(spoken) < len(first.class_names):
        spoken = {}  # two classes of one name, such as ImageNet's cranes: names identify none
    labels = [number.get(name, spoken.get(called)) for name, called in zip(shards.classes, shards.class_names)]
    if unknown := [name for name, label in zip(shards.class_names, labels) if label is None]:
        problem = f"data.mix: the classes of {shards.folder} must be among those of {first.folder}"
        remedy = "shard it with class folders or --class-names as there, or make the set with all classes data.path"
        raise UserError(f"{problem}, got {len(unknown)} others ({first_few(unknown)})", remedy)
    return np.array(labels, dtype=np.int64)
