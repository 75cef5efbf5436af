"""Find the length of a run: its images, steps, evaluations, checkpoints, and the Slurm jobs that it takes; measure its loader."""

import math
import re
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from pipeline.config import AugmentConfig, Config
from pipeline.config.tables import DATA_SETS
from pipeline.errors import UserError
from pipeline.loader.batches import TrainBatches
from pipeline.loader.loader import CPU, Loader
from pipeline.planning.traced_step import TracedStep
from pipeline.shards.manifest import MANIFEST, SplitInfo
from pipeline.shards.shard_set import ShardSet, open_files
from pipeline.stores.place import Place, parse_place
from pipeline.stream.samples import Mixture
from pipeline.stream.schedule import make_schedule

SIGNAL_SECONDS = 300  # of a job's end that the job scripts keep for the last checkpoint (--signal=USR1@300)
_FLOAT = 4  # bytes
HEADER_ENTRY = 146  # bytes that a file's header has of each tensor, about
_LARGEST_BATCH = 32  # images with which the loader is measured: small batches begin soon, and cost as much each
_WARM_UP = 2  # batches
# CPU seconds of a training image of ImageNet at 224 px, and bytes of its file (docs/results/loader.md).
IMAGE_SECONDS, RECIPE_SECONDS, IMAGE_BYTES = 1.39e-3, 2.51e-3, 110e3


@dataclass(frozen=True)
class Images:
    """Sizes of the splits, and the share of the source's images that ``--subset`` kept."""

    train: int
    val: int
    subset: float
    source: str


def count_images(config: Config, data: Place | None) -> Images | None:
    """How many images the run has: by its shards' manifests, else by the number of classes; None if nothing tells. ``data``:
    shard set; None: ``data.path`` if it is there. Raises UserError: ``data`` holds no shard set, or one of other classes."""
    place = parse_place(data or config.data.path)
    if data or not isinstance(place, Path) or place.is_dir():
        try:
            return _of_shards(config, place)
        except UserError:
            if data:
                raise
    known = next((known for known in DATA_SETS.values() if known.classes == config.model.num_classes), None)
    if known is None:
        return None
    return Images(known.images, known.val_images, 1.0, f"{known.title}, by its {known.classes} classes; --data SHARDS counts")


def _of_shards(config: Config, place: Place) -> Images:
    """Those of a set in a folder or a store, and in an epoch of the training those that ``data.mix`` adds."""
    train, val = (_split_of(place, split, config.model.num_classes) for split in ("train", "val"))
    mixed = [_split_of(parse_place(folder), "train") for folder in config.data.mix]
    mixture = Mixture((train.samples, *(split.samples for split in mixed)), (1.0, *config.data.mix.values()))
    source = f"{place} and {len(mixed)} more of data.mix" if mixed else str(place)
    return Images(mixture.images, val.samples, train.source.get("subset", 1.0), source)


def _split_of(place: Place, split: str, classes: int | None = None) -> SplitInfo:
    manifest = open_files(place, split).manifest
    if classes is not None and len(manifest.classes) != classes:
        problem = f"model.num_classes must be the {len(manifest.classes)} classes of {place}, got {classes}"
        raise UserError(problem, f"set model.num_classes={len(manifest.classes)}, or pass other shards")
    if split not in manifest.splits:
        problem = f"{place / MANIFEST} must have the splits train and val, got {', '.join(manifest.splits) or 'none'}"
        raise UserError(problem, "pass a complete shard set")
    return manifest.splits[split]


@dataclass(frozen=True)
class Length:
    """What a run does from its start to its end."""

    steps: int
    epochs: float  # passes over the training set, cooldown included; fewer with ``train.max_steps``
    evaluations: int  # passes over the validation set, of which each counts twice with a weight average
    saves: int  # checkpoints, those for the best accuracy left out


def length_of(config: Config, images: Images) -> Length:
    """What the run's schedule comes to. Raises UserError: the schedule is shorter than a step."""
    schedule = make_schedule(config, images.train, images.subset)
    steps, every = schedule.last_step, config.checkpoint.every_steps
    saves = 1 if every is None else math.ceil(steps / every)
    return Length(steps, schedule.epoch(steps), schedule.evaluations(config.eval.every_epochs), saves)


def parse_time_limit(text: str) -> float:
    """A time limit in Slurm's forms: minutes, M:S, H:M:S, D-H, D-H:M, D-H:M:S. Returns seconds. Raises UserError: it is none of
    these, or too short to train in."""
    remedy = "write it as sbatch takes it, such as 24:00:00 or 3-00:00:00"
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if not found:
        raise UserError(f"--time-limit must be a time in Slurm's form, got {text!r}", remedy)
    days, *given = found.groups()
    numbers = [int(part) for part in given if part is not None]
    from_hours = days is not None or len(numbers) == 3
    hours, minutes, seconds = ((*numbers, 0, 0) if from_hours else (0, *numbers, 0))[:3]
    total = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    if total <= 2 * SIGNAL_SECONDS:
        kept = f"of which the job scripts keep {SIGNAL_SECONDS} for the last checkpoint"
        must = f"--time-limit must be longer than {2 * SIGNAL_SECONDS} seconds, {kept}"
        raise UserError(f"{must}, got {text!r}, {total} seconds", remedy)
    return float(total)


def jobs_within(seconds: float, limit: float, start: float) -> int:
    """Slurm jobs, each with its start, that a run of so many seconds takes at a time limit. Raises UserError: nothing is left to train."""
    usable = limit - SIGNAL_SECONDS - start
    if usable <= 0:
        problem = f"--time-limit must leave time to train after a start of {start:.0f} seconds, got {limit:.0f} seconds"
        raise UserError(problem, "raise it")
    return max(1, math.ceil(seconds / usable))


@dataclass(frozen=True)
class Checkpoints:
    """Sizes in bytes."""

    size: int  # of one checkpoint, the parts of all processes together
    part: int  # of one process
    kept: int  # that lie on the disk at the end, the best one included


def plan_checkpoints(config: Config, step: TracedStep, length: Length, world_size: int) -> Checkpoints:
    """Plan the run's checkpoints: weights, averages and the optimizer's state in float32, buffers, and headers."""
    chosen = config.checkpoint
    numbers = step.elements * (1 + bool(config.train.ema_decay)) + step.state_elements
    headers = HEADER_ENTRY * step.tensors * numbers // step.elements
    size = _FLOAT * numbers + step.buffers + headers
    by_multiple = length.steps // chosen.keep_every_steps if chosen.keep_every_steps else 0
    kept = min(chosen.keep_last, length.saves) + int(chosen.keep_best) + by_multiple
    return Checkpoints(size, math.ceil(size / world_size), kept)


@dataclass(frozen=True)
class LoaderNeed:
    """What an image takes, decoded and augmented on the CPU."""

    cpu_seconds: float
    bytes: float  # encoded
    source: str  # of the figures


def known_loader(config: Config) -> LoaderNeed | None:
    """What an image of ImageNet takes, by this project's measurements; None for other images."""
    if config.model.num_classes != 1000:
        return None
    seconds = IMAGE_SECONDS if config.augment == AugmentConfig() else RECIPE_SECONDS
    return LoaderNeed(seconds, IMAGE_BYTES, "of ImageNet on an EPYC (--data SHARDS measures yours)")


def measure_loader(config: Config, shards: Place, threads: int = 2, seconds: float = 3.0) -> LoaderNeed:
    """Load training batches from a shard set as a run would on CPUs, for so many seconds, at least two batches, and drop them. Raises
    UserError: the shards cannot be read, or too many samples are bad."""
    train_set = ShardSet(shards, "train")
    unit = config.augment.unit
    batch = max(unit, min(config.train.micro_batch, _LARGEST_BATCH) // unit * unit)
    batches = TrainBatches.for_one_process(train_set, config, batch)
    with closing(Loader(batches, config.data, torch.device("cpu"), threads, decode=CPU)) as loader:
        for _ in range(_WARM_UP):
            next(loader)
        # Of all threads. The queues are as full at the end as at the beginning.
        began, cpu, taken = time.perf_counter(), time.process_time(), 0
        while taken < 2 or time.perf_counter() - began < seconds:
            next(loader)
            taken += 1
        spent = time.process_time() - cpu
    images = taken * batch
    return LoaderNeed(spent / images, float(train_set.samples["bytes"].mean()), f"measured here on {images:,} images")
