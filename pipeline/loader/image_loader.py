"""Give the training stream to loops of any kind: ``from pipeline import ImageLoader``."""

import hashlib
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from pipeline.cluster.environment import read_rank, share_of_node
from pipeline.cluster.world import World
from pipeline.config import Config, config_from_dict, load_config
from pipeline.errors import UserError
from pipeline.loader.epochs import EpochBatches, per_sample, sample_weights
from pipeline.loader.loader import Batch, Loader
from pipeline.loader.probe import usable_decoding
from pipeline.loader.reader import BadSamples
from pipeline.shards.files.cached import CachedFiles, cache_of
from pipeline.shards.mixed_set import MixedSet, open_training_set
from pipeline.shards.shard_set import ShardSet
from pipeline.stream.samples import DamagedSample, Samples


class ImageBatch(tuple):
    """A batch of n images: the tuple ``(images, labels)``, with attributes.

    Attributes:
        samples: (n,) int64 NumPy array: the samples' numbers in the set.
        mixed: the targets that Mixup and CutMix make of the labels: (n, classes) float32, or the shape of labels that are no classes.
    """

    samples: np.ndarray
    _mix: Callable[[], Tensor]

    def __new__(cls, pair: Iterable[Tensor], **known: Any) -> "ImageBatch":
        # Of a pair alone where a library moves it to a device.
        batch = super().__new__(cls, pair)
        vars(batch).update(known)
        return batch

    @property
    def mixed(self) -> Tensor:
        return self._mix()


class RandomAccess(Dataset):
    """``(image, label)`` of each sample: the whole image, (3, H, W) uint8 on the CPU, not augmented, and an integer, or what ``labels`` has.

    Args:
        opened: opens the set: in workers of a DataLoader that are started anew, which cannot get open files.
        labels: (samples,) or (samples, k); None: the classes.
        samples: the set, if it is open.
    """

    def __init__(self, opened: Callable[[], Samples], labels: np.ndarray | None, samples: Samples | None = None) -> None:
        self._opened, self._labels, self._samples = opened, labels, samples or opened()

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        """Raises IndexError: there is no such sample; UserError: it cannot be read or decoded."""
        at = range(len(self))[index]
        label = self._samples.samples[np.array([at])]["label"].astype(np.int64) if self._labels is None else self._labels[[at]]
        try:
            encoded = io.BytesIO(self._samples.read(at).tobytes())
            pixels = np.array(Image.open(encoded).convert("RGB"))  # (H, W, 3); EXIF's orientation is ignored, as in training
        except (DamagedSample, OSError) as error:
            damage = error if isinstance(error, DamagedSample) else self._samples.damaged(at, f"cannot be decoded ({error})")
            raise UserError(str(damage), "restore the file") from None
        return torch.from_numpy(pixels).permute(2, 0, 1), label[0].item() if label.ndim == 1 else torch.from_numpy(label[0])

    def __reduce__(self) -> tuple:
        return type(self), (self._opened, self._labels)


class ImageLoader(AbstractContextManager["ImageLoader"]):
    """The batches of a shard set for a training loop of your own, decoded, augmented and on the device::

        with ImageLoader("data/imagenet", batch_size=256) as loader:
            for epoch in range(loader.epoch, 90):
                for images, labels in loader:  # (256, 3, 224, 224) float32, normalized; (256,) int64
                    ...

    Samples, their order and all that is drawn for them are those of a training run with the same seed and settings: functions of the
    seed, the epoch and the position in it, on any number of processes. Each iteration yields an epoch, or the rest of one: a loop that
    was left early, or a loaded state, goes on with the next batch. Threads decode ahead, also into the next epoch.

    An epoch has each sample exactly once over all ranks. All ranks have the same number of batches, and share the images that are left
    for the last ones evenly. Only if fewer images than ranks are left and the batch before has none to give (``batch_size=1``, or an
    epoch that was resumed on more processes), the last ranks have a batch less. A sample that cannot be read is replaced by the set's
    next one, label included.

    Args:
        path: a shard set, as ``pervit shard`` writes it: a folder or a URL.
        split: ``train``, ``val`` or another that the set has.
        batch_size: images per batch of this process.
        image_size: side of the images, pixels; ``data={"size_schedule": [[0, 128], [10, 224]]}`` changes it with the epoch.
        augment: what follows the random crop and the flip: ``"deit"``, DeiT's recipe with every image once in an epoch; a config or
            its name, such as ``"pervit_t"``, of which ``data`` and ``augment`` are taken as they are; or ``augment`` keys,
            ``{"mixup": 0.8}``, of which there may be none. None: the centre crop of an evaluation instead.
        seed: of the order and all draws.
        rank, world_size: of this process; by default those of torch.distributed, RANK and WORLD_SIZE, or a Slurm step.
        device: of the batches; by default the current CUDA device, or the CPU.
        threads: that decode; by default this process's share of the cores.
        shuffle: False: samples come in the set's order.
        drop_last: leave out what is left of an epoch behind the last batches that are complete on all ranks.
        transform: called with the images of each batch in the thread that iterates; returns what takes their place.
        labels: of all samples by their number, instead of classes: (samples,) or (samples, k) integers or floats.
        sampling: ``"balanced"``: show all classes, or integer ``labels``, equally often; or (samples,) weights of at least 0. An epoch
            stays as long, and shows a sample that is due 2.3 times two or three times.
        mixed_targets: yield ``batch.mixed`` as the labels.
        data: further ``data`` keys of a config, such as ``{"order": "block", "flip": 0}``.

    Attributes:
        classes: what to call them, by label.
        bad_samples: number of a sample that cannot be read -> the reason.

    Raises:
        UserError: there is no such set, or a setting is wrong. Iterating: the loader is closed, or more samples are bad than
            ``data.max_bad_samples``.
    """

    sampler = None  # timm's training script asks a DataLoader for it

    def __init__(
        self,
        path: str | os.PathLike[str],
        split: str = "train",
        batch_size: int = 256,
        image_size: int = 224,
        augment: str | Mapping[str, Any] | Config | None = "deit",
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        device: torch.device | str | None = None,
        threads: int | None = None,
        shuffle: bool = True,
        *,
        drop_last: bool = False,
        transform: Callable[[Tensor], Any] | None = None,
        labels: Any = None,
        sampling: Any = None,
        mixed_targets: bool = False,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        rank, ranks = _place(rank, world_size)
        tree: dict[str, Any] = {"seed": seed, "model": {"image_size": image_size}, "data": {"path": os.fspath(path)}}
        tree["data"] |= {} if threads is None else {"num_threads": threads}
        tree["train"] = {"micro_batch_size": batch_size, "global_batch_size": batch_size * ranks}
        config = self._config = _config(tree, augment, data or {})
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if self._device.type == "cuda" and self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._threads = share_of_node(ranks)[1]
        opened = partial(open_training_set, mix=config.data.mix) if split == "train" else partial(ShardSet, split=split)
        self._opened = partial(opened, config.data.path, readers=ranks)
        try:
            shards = self._opened(cache=cache_of(config.data))
        except UserError as error:
            raise UserError(str(error).replace("data.path", "path")) from None  # as the argument is called
        self._shards: ShardSet | MixedSet | None = shards
        self._transform, self._mixed_targets = transform, mixed_targets
        self.classes, self.bad_samples = shards.class_names, dict[int, str]()
        self._bad = BadSamples(shards, config.data.max_bad_samples)
        self._labels = None if labels is None else per_sample("labels", labels, len(shards), (1, 2))
        self._classes = len(shards.classes) if self._labels is None else int(self._labels.max()) + 1
        weights = None if sampling is None else sample_weights(sampling, shards, self._labels)
        if weights and (shards.mixture or config.data.order == "block" or not shuffle):
            raise UserError("sampling requires shuffle=True, data.order=full and no data.mix", "leave one of them out")
        batches = EpochBatches.of_run(shards, config, rank, ranks)
        self._batches = replace(batches, weights=weights, drop_last=drop_last, shuffle=shuffle, centred=augment is None)
        steps = self._batches.steps(0)
        if not steps:
            raise UserError(f"drop_last=True leaves none of an epoch's {self._batches.epoch_length} images", "leave it out")
        self._length = sum(first < end for first, end in map(self._batches.share, steps))
        self._stream = {
            "data": shards.identity(),
            "split": split,
            "seed": seed,
            "shuffle": shuffle,
            "order": [config.data.order, config.data.block_size, config.data.window_blocks],
            "repeats": config.augment.repeats,
            "weights": hashlib.sha256(weights.ends.tobytes() + weights.samples.tobytes()).hexdigest() if weights else None,
        }
        self._next = 0, 0  # epoch and position at which the next batch begins
        self._loader: Loader[EpochBatches] | None = None
        self._number = 0  # of its next batch

    @property
    def epoch(self) -> int:
        """Epoch of the next batch; 0 is the first."""
        return self._next[0]

    def __len__(self) -> int:
        """Batches of this rank in a whole epoch."""
        return self._length

    def __iter__(self) -> Iterator[ImageBatch]:
        """The rest of the epoch. Several iterators take turns: there is one stream."""
        self._check_open()
        return self._rest_of_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch begins, as plain values, the same on all ranks after the same number of batches.

        Another number of processes or another batch size may load it: every sample that the epoch lacks follows exactly once.
        """
        epoch, position = self._next
        return {"epoch": epoch, "position": position, "stream": self._stream}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a loader was when it gave its :meth:`state_dict`. Raises UserError: it is no such state, or that of
        another set, seed or order."""
        self._check_open()
        try:
            epoch, position, stream = (state[key] for key in ("epoch", "position", "stream"))
            differs = [
                f"{key} {own!r:.200}, got {stream[key]!r:.200}" for key, own in self._stream.items() if stream[key] != own
            ]
            if min(epoch, position) < 0 or not differs and position >= self._batches.epoch_length:
                raise ValueError
        except (TypeError, KeyError, ValueError):
            raise UserError(f"the state must be one of state_dict(), got {state!r:.80}", "load one that was saved") from None
        if differs:
            raise UserError(f"the state must be of a loader with {differs[0]}", "make this one as that one was made")
        self._stop()
        self._next = int(epoch), int(position)

    @property
    def random_access(self) -> RandomAccess:
        """The set as a data set of PyTorch's, by sample number."""
        self._check_open()
        return RandomAccess(self._opened, self._labels, self._shards)

    def close(self) -> None:
        """End the threads, give back memory and files. A closed loader stays closed; closing it twice does nothing."""
        self._stop()
        for shards in self._shards.sets if self._shards else ():
            if isinstance(shards.files, CachedFiles):
                shards.files.close()
        self._shards = None
        for part in ("_batches", "_bad"):
            vars(self).pop(part, None)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _rest_of_epoch(self) -> Iterator[ImageBatch]:
        epoch = self.epoch
        while self.epoch == epoch:
            self._check_open()
            batch = self._take()
            if len(batch.samples):
                yield batch

    def _take(self) -> ImageBatch:
        """The next batch, which has no images where other ranks have the last of the epoch."""
        side = self._config.data.side_at(self.epoch, self._config.model.image_size)
        if self._loader is None or side != self._batches.image_size:
            self._stop()
            data, (epoch, begin) = self._config.data, self._next
            decode, form = usable_decoding(data.decode, self._batches.shards, World(0, 1, self._device, self._threads))
            self._batches, self._number = replace(self._batches, image_size=side, epoch=epoch, begin=begin), 0
            self._loader = Loader(self._batches, data, self._device, self._threads, bad=self._bad, decode=decode, form=form)
        batch = next(self._loader)
        self._number += 1
        self._next = self._batches.place(self._number)[:2]
        self.bad_samples.update(self._bad.take_unreported())
        count = int(batch.request.valid.sum())  # the first ones
        images, (own, other, weight) = batch.images[:count], (part[:count] for part in self._targets(batch))
        mix = partial(_mixed, own, other, weight, self._classes)
        images = self._transform(images) if self._transform and count else images
        return ImageBatch((images, mix() if self._mixed_targets else own), samples=batch.request.index[:count], _mix=mix)

    def _targets(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """The labels of the images and of those mixed with them, (B,) or (B, k), and the weight of the own, (B,)."""
        if self._labels is None:
            return batch.labels, batch.other_labels, batch.weight
        request = replace(batch.request, label=np.arange(len(batch.request.index)))
        mixed = [pair[0] for augmentation in request.of_batches if (pair := augmentation.mixed_labels(request))]
        own = self._labels[request.index]
        there = [torch.from_numpy(labels).to(self._device) for labels in (own, own[mixed[-1]] if mixed else own)]
        return there[0], there[1], batch.weight

    def _stop(self) -> None:
        if self._loader:
            self._loader.close()
        self._loader = None

    def _check_open(self) -> None:
        if self._shards is None:
            raise UserError("this ImageLoader is closed", "make a new one")


def _mixed(own: Tensor, other: Tensor, weight: Tensor, classes: int) -> Tensor:
    if own.ndim == 1 and not own.is_floating_point():
        own, other = (F.one_hot(labels, classes) for labels in (own, other))
    return torch.lerp(other.float(), own.float(), weight if own.ndim == 1 else weight[:, None])


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and world size: those given, of torch.distributed, or of the environment."""
    if rank is None and world_size is None:
        return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else read_rank()
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise UserError(f"rank must be from 0 to world_size - 1, got {rank} of {world_size}", "pass both or neither")
    return rank, world_size


def _config(tree: dict[str, Any], augment: str | Mapping[str, Any] | Config | None, data: Mapping[str, Any]) -> Config:
    """The config of a training run with the keys of ``tree`` and the loader's augmentation."""
    if isinstance(augment, str):
        recipe = load_config("base/deit_recipe" if augment == "deit" else augment)
        augment = recipe.with_values({"augment.repeats": 1}) if augment == "deit" else recipe
    if isinstance(augment, Config):
        data = {**augment.data.model_dump(mode="json"), "mix": {}, **data}
        augment = augment.augment.model_dump(mode="json")
    if augment is None:
        data = {**data, "train_crop": "random_resized", "train_interpolation": "bicubic"}
    return config_from_dict({**tree, "data": {**data, **tree["data"]}, "augment": dict(augment or {})}, source="ImageLoader")
