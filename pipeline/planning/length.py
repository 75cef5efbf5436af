"""Find the length of a run: its images, steps, evaluations, checkpoints, and the Slurm jobs that it takes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config import Config
from pipeline.errors import UserError
from pipeline.shards.manifest import MANIFEST, SplitInfo
from pipeline.shards.shard_set import open_files
from pipeline.stores.place import Place, parse_place
from pipeline.stream.samples import Mixture
from pipeline.stream.schedule import make_schedule

if TYPE_CHECKING:
    from pipeline.planning.traced_step import TracedStep

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
_FLOAT = 4  # bytes
HEADER_ENTRY = 146  # bytes that a file's header has of each tensor, about
_HOLD_UP_RATE = 5e9  # bytes per second of the copy to the CPU's memory for which a save holds up the training; an assumption


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
        data: shard set; None: ``data.path`` if it is there.

    Returns:
        None if nothing tells.

    Raises:
        UserError: ``data`` holds no shard set, or one of other classes.
    """
    place = parse_place(data or config.data.path)
    if data and isinstance(place, Path) and not place.is_dir():
        raise UserError(
            f"--data must be a shard set, got {data}, which is not a directory",
            "pass the folder that data_prep.shard_imagenet wrote",
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
    mixed = [_split_of(parse_place(folder), SPLITS[0]) for folder in config.data.mix]
    sizes = (train.samples, *(split.samples for split in mixed))
    mixture = Mixture(sizes, (1.0, *config.data.mix.values()))
    source = f"{place} and {len(mixed)} more of data.mix" if mixed else str(place)
    return Images(mixture.images, val.samples, train.source.get("subset", 1.0), source)


def _split_of(place: Place, split: str, classes: int | None = None) -> SplitInfo:
    manifest = open_files(place, split).manifest()
    if classes is not None and len(manifest.classes) != classes:
        raise UserError(
            f"model.num_classes must be the {len(manifest.classes)} classes of {place}, got {classes}",
            f"set model.num_classes={len(manifest.classes)}, or pass other shards",
        )
    if split not in manifest.splits:
        raise UserError(
            f"{place / MANIFEST} must have the splits {' and '.join(SPLITS)}, got {', '.join(manifest.splits) or 'none'}",
            "pass a complete shard set",
        )
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
    """A time limit in Slurm's forms: minutes, M:S, H:M:S, D-H, D-H:M, D-H:M:S. Returns seconds.

    Raises:
        UserError: it is none of these, or too short to train in.
    """
    remedy = "write it as sbatch takes it, such as 24:00:00 or 3-00:00:00"
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if not found:
        raise UserError(f"--time-limit must be a time in Slurm's form, got {text!r}", remedy)
    days, *given = found.groups()
    numbers = [int(part) for part in given if part is not None]
    from_hours = days is not None or len(numbers) == 3
    hours, minutes, seconds = ((*numbers, 0, 0) if from_hours else (0, *numbers, 0))[:3]
    total = int(days or 0) * _DAY + hours * _HOUR + minutes * _MINUTE + seconds
    if total <= 2 * SIGNAL_SECONDS:
        raise UserError(
            f"--time-limit must be longer than {2 * SIGNAL_SECONDS} seconds, of which the job scripts keep {SIGNAL_SECONDS} for the last "
            f"checkpoint, got {text!r}, {total} seconds",
            remedy,
        )
    return float(total)


def jobs_within(seconds: float, limit: float, start: float) -> int:
    """Slurm jobs, each with its start, that a run of so many seconds takes at a time limit. Raises UserError: nothing is left to train."""
    usable = limit - SIGNAL_SECONDS - start
    if usable <= 0:
        raise UserError(
            f"--time-limit must leave time to train after a start of {start:.0f} seconds, got {limit:.0f} seconds", "raise it"
        )
    return max(1, math.ceil(seconds / usable))


@dataclass(frozen=True)
class Checkpoints:
    """Sizes in bytes."""

    size: int  # of one checkpoint, the parts of all processes together
    part: int  # of one process
    kept: int  # that lie on the disk at the end, the best one included
    regular: int  # written over the whole run by ``checkpoint.every_steps``, and at its end
    written: int  # at most: an evaluation that is the best so far adds one

    @property
    def hold_up(self) -> float:
        """Seconds for which a save holds up the training: one copy in memory; writing goes on beside it."""
        return self.part / _HOLD_UP_RATE


def plan_checkpoints(config: Config, step: TracedStep, length: Length, world_size: int) -> Checkpoints:
    """Plan the run's checkpoints: weights, averages and the optimizer's state in float32, buffers, and headers."""
    chosen = config.checkpoint
    numbers = step.elements * (1 + bool(config.train.ema_decay)) + step.state_elements
    headers = HEADER_ENTRY * step.tensors * numbers // step.elements
    size = _FLOAT * numbers + step.buffers + headers
    by_multiple = length.steps // chosen.keep_every_steps if chosen.keep_every_steps else 0
    kept = min(chosen.keep_last, length.saves) + int(chosen.keep_best) + by_multiple
    written = length.saves + (length.evaluations if chosen.keep_best else 0)
    return Checkpoints(size, math.ceil(size / world_size), kept, length.saves, written)
