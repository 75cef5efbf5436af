"""Choose the images of an analysis: some of a split, at random, and examples that are shown with their maps."""

import logging
from collections.abc import Sequence

import numpy as np
import torch

from pipeline.analysis.chapter import Example
from pipeline.cluster.world import World
from pipeline.config import Config
from pipeline.errors import UserError
from pipeline.inference.evaluation import check_same_classes, evaluation_loader
from pipeline.inference.sets import ChosenImages
from pipeline.shards.image_folder import ImageFolder, open_split
from pipeline.shards.shard_set import ShardSet
from pipeline.stores.place import Place
from pipeline.stream.order import sample_at
from pipeline.stream.philox import Stream

_log = logging.getLogger(__name__)


def open_images(data: Place, split: str, classes: Sequence[str], checkpoint: str) -> ShardSet | ImageFolder:
    """Open the split. A trained model needs images of its own classes; fresh weights, which have none, take any. Raises
    UserError: there is no such data, it has no images, or other classes."""
    images = open_split(data, split, classes or None)
    if classes:
        check_same_classes(images, list(classes), of=checkpoint)
    if len(images) == 0:
        raise UserError(f"{images.folder} must have at least 1 image in {split}, got 0", "pass another --data or --split")
    return images


def choose(size: int, count: int, seed: int) -> np.ndarray:
    """Numbers of ``count`` samples out of ``size``, at random without replacement; all of them if there are fewer.

    The first of them are a random choice too, and the same for every count: (min(count, size),) int64, in random order.
    """
    return sample_at(np.arange(min(count, size)), 0, size, seed, Stream.SUBSET)


def example_numbers(split: ShardSet | ImageFolder, keys: Sequence[str], count: int, seed: int) -> np.ndarray:
    """Sample numbers of the examples: those with the given keys, or without keys the first ``count`` of :func:`choose`. Raises
    UserError: there is no sample of a key."""
    if not keys:
        return choose(len(split), count, seed)
    found = {key: index for index in range(len(split)) if (key := split.key(index)) in keys}
    for key in keys:
        if key not in found:
            problem = f"{split.folder} has no sample {key!r} in {split.split or 'the folder'}"
            raise UserError(problem, f"pass keys such as {split.key(0)} and {split.key(len(split) - 1)}")
    return np.array([found[key] for key in keys], dtype=np.int64)


def load_examples(split: ShardSet | ImageFolder, numbers: np.ndarray, config: Config, world: World) -> list[Example]:
    """Decode the examples, by their sample numbers (n,), as an evaluation does. Those that cannot be used are left out, with a warning.
    Not collective."""
    if len(numbers) == 0:
        return []
    images = ChosenImages(split, numbers)
    one_batch = {"eval.batch_size": len(numbers), "data.read_ahead": 1, "data.prefetch": 1}
    loader = evaluation_loader(images, config.with_values(one_batch), World(0, 1, world.device, world.cpu_threads))
    batch = next(loader)
    loader.close()
    for sentence in loader.bad.take_unreported().values():
        _log.warning(sentence)
    mean, std = (
        torch.tensor(values, device=world.device)[:, None, None] for values in (config.data.mean, config.data.std)
    )  # (3, 1, 1)
    return [
        Example(
            key=images.key(place),
            label=images.class_names[int(batch.request.label[place])],
            pixels=(batch.images[place] * std + mean).clamp(0, 1).cpu(),
            image=batch.images[place].clone(),
        )
        for place in range(len(numbers))
        if batch.request.valid[place]
    ]
