"""The length of a run: images, steps, evaluations; hours, Slurm jobs, GPU hours and money."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from pipeline.config import Config
from pipeline.data.manifest import MANIFEST, SplitInfo
from pipeline.data.samples import Mixture
from pipeline.data.schedule import make_schedule
from pipeline.data.shards import open_files
from pipeline.errors import UserError
from pipeline.planning.network import NETWORK
from pipeline.stores.place import Place, parse_place

# Images of the train and the val split by the number of classes, for a plan without shards.
_KNOWN_SETS = {
    10: ("CIFAR-10", 50_000, 10_000),
    100: ("CIFAR-100", 50_000, 10_000),
    1000: ("ImageNet-1k", 1_281_167, 50_000),
    1010: ("iNaturalist 2019", 265_213, 3_030),
}
SPLITS = ("train", "val")
SIGNAL_SECONDS = 300  # of a job's end that the job scripts keep for the last checkpoint (--signal=USR1@300)
_DAY, _HOUR, _MINUTE = 86400, 3600, 60


@dataclass(frozen=True)
class Options:
    """What a plan takes from its command line, beside the run itself.

    Attributes:
        time_limit: of a Slurm job, in seconds; None: no number of jobs.
        price: of an hour of a GPU; None: no sum.
        network: bytes per second between a node and the others.
        data: shard set on which the loader is measured; None: it is not.
    """

    time_limit: float | None = None
    price: float | None = None
    network: float = NETWORK
    data: Place | None = None


@dataclass(frozen=True)
class Images:
    """Sizes of the splits, and the share of the source's images that ``--subset`` kept."""

    train: int
    val: int
    subset: float
    source: str


def count_images(config: Config, data: Place | None) -> Images | None:
    """How many images the run has: by the manifests of its shards, else by the number of classes.

    Args:
        config: of the run.
        data: shard set; None: ``data.path`` if it is there.

    Returns:
        None if nothing tells.

    Raises:
        UserError: ``data`` holds no shard set, or one of other classes.
    """
    place = parse_place(data or config.data.path)
    if data and isinstance(place, Path) and not place.is_dir():
        raise UserError(
            f"--data {data} is no folder, a shard set needed", "pass the folder that data_prep.shard_imagenet wrote"
        )
    if data or not isinstance(place, Path) or place.is_dir():
        try:
            return _of_shards(config, place)
        except UserError:
            if data:
                raise
    known = _KNOWN_SETS.get(config.model.num_classes)
    if known is None:
        return None
    name, train, val = known
    return Images(train, val, 1.0, f"{name}, by its {config.model.num_classes} classes; --data SHARDS counts")


def _of_shards(config: Config, place: Place) -> Images:
    """Those of a set in a folder or a store, and in an epoch of the training those that ``data.mix`` adds."""
    train, val = (_split_of(place, split, config.model.num_classes) for split in SPLITS)
    further = {folder: _split_of(parse_place(folder), SPLITS[0]) for folder in config.data.mix}
    sizes = (train.samples, *(each.samples for each in further.values()))
    mixture = Mixture(sizes, (1.0, *config.data.mix.values()))
    source = f"{place} and {len(further)} more of data.mix" if further else str(place)
    return Images(mixture.images, val.samples, train.source.get("subset", 1.0), source)


def _split_of(place: Place, split: str, classes: int | None = None) -> SplitInfo:
    manifest = open_files(place, split).manifest()
    if classes is not None and len(manifest.classes) != classes:
        raise UserError(
            f"model.num_classes is {classes}, but {place} has {len(manifest.classes)} classes",
            f"set model.num_classes={len(manifest.classes)}, or pass other shards",
        )
    if split not in manifest.splits:
        raise UserError(f"{place / MANIFEST} has no split {split!r}, {' and '.join(SPLITS)} needed", "pass a whole shard set")
    return manifest.splits[split]


@dataclass(frozen=True)
class Length:
    """What a run does from its start to its end.

    Attributes:
        steps: optimizer steps.
        epochs: passes over the training set, cooldown included; fewer with ``train.max_steps``.
        evaluations: passes over the validation set, of which each counts twice with a weight average.
        saves: checkpoints, those for the best accuracy left out.
    """

    steps: int
    epochs: float
    evaluations: int
    saves: int


def length_of(config: Config, images: Images) -> Length:
    """What the run's schedule comes to.

    Raises:
        UserError: the schedule is shorter than a step.
    """
    schedule = make_schedule(config, images.train, images.subset)
    steps, every = schedule.last_step, config.checkpoint.every_steps
    saves = 1 if every is None else math.ceil(steps / every)
    return Length(steps, schedule.epoch(steps), schedule.evaluations(config.eval.every_epochs), saves)


def parse_time_limit(text: str) -> float:
    """A time limit in Slurm's forms: minutes, M:S, H:M:S, D-H, D-H:M, D-H:M:S. Returns seconds.

    Raises:
        UserError: it is none of these, or too short to train in.
    """
    remedy = "write it as sbatch takes it, such as 24:00:00 or 3-00:00:00"
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if not found:
        raise UserError(f"--time-limit is {text!r}, a time in Slurm's form needed", remedy)
    days, *given = found.groups()
    numbers = [int(part) for part in given if part is not None]
    if days is not None:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours, (minutes, seconds) = 0, (*numbers, 0)[:2]
    total = int(days or 0) * _DAY + hours * _HOUR + minutes * _MINUTE + seconds
    if total <= 2 * SIGNAL_SECONDS:
        raise UserError(
            f"--time-limit is {text!r}, {total} seconds, of which the job scripts keep {SIGNAL_SECONDS} for the last checkpoint",
            remedy,
        )
    return float(total)


def jobs_within(seconds: float, limit: float, start: float) -> int:
    """Slurm jobs, each with its start, that a run of so many seconds takes at a time limit. Raises UserError: nothing is left to train."""
    usable = limit - SIGNAL_SECONDS - start
    if usable <= 0:
        raise UserError(f"--time-limit is {limit:.0f} seconds, and a start takes {start:.0f} of them", "raise it")
    return max(1, math.ceil(seconds / usable))
