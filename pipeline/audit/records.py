"""Compare what a run has written with what follows from its config, and with itself; nothing is trained.

The learning rate of a step, its samples and all that is drawn for them are pure functions of the config and the data set, so that every row
of ``metrics.jsonl`` and of the sample logs can be computed again.
"""

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.checkpoint.manifest import RunState, find_damage
from pipeline.checkpoint.parts import find_gaps, find_not_finite
from pipeline.config import Config, config_from_dict
from pipeline.errors import counted
from pipeline.loader.batches import TrainBatches
from pipeline.logs.run_files import augmentation_digests, code_version
from pipeline.optim.build import learning_rate
from pipeline.runs import CONFIG, METRICS, SAMPLES
from pipeline.runs.files import RunFiles
from pipeline.runs.rows import Row, Tail, is_count, kind_of, parse_row
from pipeline.shards.mixed_set import open_training_set
from pipeline.stream.samples import DamagedSample, images_per_epoch
from pipeline.stream.schedule import make_schedule
from pipeline.terminal import Stage
from pipeline.training.folder import changes, config_hash

_NAMED = 5  # problems of a kind that are listed


@dataclass(frozen=True)
class Finding:
    """What one kind of record was compared with, and what does not agree."""

    name: str
    compared: str
    problems: list[str] = field(default_factory=list)


class Records:
    """The records of a run. Raises UserError: it has no readable config or no checkpoint, or its data set cannot be opened.
    ``config``: of ``config.yaml``, with the place of the data."""

    def __init__(self, files: RunFiles, config: Config) -> None:
        self.files, self.config = files, config
        self.manifests = {found.step: found.manifest for found in files.checkpoints if found.manifest}
        self.configs = {
            step: config_from_dict(manifest.state.config, f"the checkpoint of step {step}")
            for step, manifest in self.manifests.items()
        }
        self.damaged = set[int]()  # steps of checkpoints, which :meth:`checkpoints` has found
        self.train_set = open_training_set(config.data.path, config.data.mix)
        images, subset = images_per_epoch(self.train_set), self.train_set.subset
        self.schedule = make_schedule(config.with_values({"train.max_steps": None}), images, subset)

    def findings(self) -> Iterator[Finding]:
        """One for each kind of record."""
        for kind in (self.checkpoints, self.run_config, self.code, self.data, self.metrics, self.samples):
            with Stage(f"comparing {kind.__name__}"):
                compared, *problems = kind()
            more = len(problems) - _NAMED
            problems[_NAMED:] = [f"... and {counted(more, 'more difference')}"] if more > 0 else []
            yield Finding(kind.__name__.removeprefix("run_"), compared, problems)

    @cached_property
    def rows(self) -> list[Row]:
        return read_rows(self.files.path)

    @cached_property
    def steps(self) -> dict[int, Row]:
        """The row of each step."""
        return {row["step"]: row for row in self.rows if kind_of(row) == "step" and "loss" in row}

    def config_of(self, step: int) -> Config:
        """The config by which a step was taken: that of the next checkpoint, else of the newest start."""
        return next((config for saved, config in self.configs.items() if saved >= step), self.config)

    # What is compared, then what differs.

    def checkpoints(self) -> Iterator[str]:
        size = sum(found.bytes or 0 for found in self.files.checkpoints)
        yield f"{counted(len(self.files.checkpoints), 'checkpoint')} ({size / 2**20:,.0f} MiB) with checksums and records"
        for found in self.files.checkpoints:
            if found.manifest is None:
                yield found.problem or f"{found.folder} cannot be read"
                continue
            state, files, folder = found.manifest.state, found.manifest.files, found.folder
            damage = find_damage(folder, files) or find_gaps(folder, found.manifest) or find_not_finite(folder, files)
            self.damaged |= {found.step} if damage else set()
            yield from damage
            for name, due in self._due(state).items():
                if (got := getattr(state, name)) != due:
                    yield f"{folder}: {name} must be {due}, got {got}"

    def _due(self, state: RunState) -> dict[str, Any]:
        """What the state of a checkpoint must be, by its config, the schedule and the log."""
        scored = [row for row in self.rows if kind_of(row) == "evaluation" and row["step"] <= state.step - state.evaluation_due]
        top1 = max((row["top1"] for row in scored), default=None)
        return {
            "config_hash": config_hash(self.configs[state.step]),
            "samples": self.schedule.samples(state.step),
            "skipped_steps": self.steps.get(state.step, {}).get("skipped_steps", state.skipped_steps),
            "best": state.best and {**state.best, "top1": top1},
        }

    def run_config(self) -> Iterator[str]:
        yield f"{CONFIG} with the configs of {counted(len(self.configs), 'checkpoint')}"
        chain = [(f"the checkpoint of step {step}", config) for step, config in self.configs.items()]
        for (before, old), (after, new) in zip(chain, [*chain[1:], (CONFIG, self.config)]):
            for key, (was, now) in changes(new, old)[1].items():
                yield f"{key} is {was} in {before}, but {now} in {after}"

    def code(self) -> Iterator[str]:
        yield f"{counted(len(self.files.starts), 'start')} with the code and the packages here"
        known = {found.problem for found in self.files.checkpoints}
        yield from (problem for problem in self.files.problems if problem not in known)  # of environment.json and others
        here = code_version(self.config)
        here |= here.pop("packages")
        for number, start in enumerate(self.files.starts, 1):
            there = {**start, **(start.get("packages") or {})}
            for key, now in here.items():
                if there.get(key, now) != now:
                    yield f"{key} of start {number} is {there[key]}, here {now}: audit with that version"

    def data(self) -> Iterator[str]:
        sets, now = self.train_set.sets, self.train_set.identity()
        shards = counted(sum(len(each.info.shards) for each in sets), "shard")
        yield f"the training set with the checkpoints, and an image of each of {shards} with its checksum"
        accepted = "data" in self.config.checkpoint.accept  # another set than at first
        for step, manifest in list(self.manifests.items())[-1 if accepted else 0 :]:
            was = manifest.state.data
            for key in sorted(key for key in was.keys() | now.keys() if was.get(key) != now.get(key)):
                yield f"{key} is {was.get(key)} in the checkpoint of step {step}, but {now.get(key)} in {self.config.data.path}"
        for each in sets:
            begin = np.flatnonzero(np.diff(each.samples["shard"].astype(np.int64), prepend=-1)).tolist()
            chosen = [random.randrange(first, end) for first, end in zip(begin, [*begin[1:], len(each)])]
            yield from (str(found) for found in each.read_batch(chosen) if isinstance(found, DamagedSample))

    def metrics(self) -> Iterator[str]:
        yield f"{counted(len(self.steps), 'row')} with the schedule: none missing, samples, epoch and learning rate"
        its = self.schedule
        for step in range(1, max([*self.manifests, *self.steps]) + 1):
            if (row := self.steps.get(step)) is None:
                yield f"{METRICS} has no row of step {step}"
                continue
            optim = self.config_of(step).optim
            lr = learning_rate(step - 1, its.steps_per_epoch, its.epochs, its.global_batch_size, optim)
            for key, due in {"samples": its.samples(step), "epoch": its.epoch(step), "lr": lr}.items():
                if row.get(key) != due:
                    yield f"{METRICS}: {key} of step {step} must be {due}, got {row.get(key)}"
        yield from (f"{METRICS}: {row['step']} has no top1" for row in self.rows if kind_of(row) == "damaged")

    def samples(self) -> Iterator[str]:
        logs = sorted((self.files.path / SAMPLES).glob("rank-*.jsonl"))
        if not logs:
            yield "no sample logs: log.samples was false"
            return
        replaced = sorted({int(sample) for each in self.manifests.values() for sample in each.state.bad_samples})
        places = _places(logs)
        last = max([*self.manifests, *places])
        yield f"the samples and draws of {counted(last, 'step')} with the stream, each once; replaced: {replaced or 'none'}"
        sized = stream = TrainBatches.for_one_process(self.train_set, self.config, self.config.train.global_batch_size)
        for step in range(1, last + 1):
            found: dict[tuple[int, int], tuple[int, str]] = {}
            for path, place in places.get(step, []):
                found |= _logged(path, place)
            if (side := stream.side(step - 1)) != sized.image_size:
                sized = replace(stream, image_size=side)
            due = sized.request(step - 1)
            drawn = zip(due.epoch.tolist(), due.position.tolist(), due.index.tolist(), augmentation_digests(due))
            for epoch, position, sample, digest in drawn:
                got, where = found.pop((epoch, position), None), f"step {step}, epoch {epoch}, position {position}"
                if got is None:
                    yield f"{where}: sample {sample} was not trained on"
                elif got[0] != sample and sample not in replaced:
                    yield f"{where}: must be sample {sample}, got {got[0]}"
                elif got[0] == sample and got[1] != digest:
                    yield f"{where}: sample {sample} was augmented otherwise"
            yield from (f"sample {sample} of {where} is not of step {step}" for where, (sample, _) in found.items())


def read_rows(run: Path) -> list[Row]:
    """The rows of ``metrics.jsonl`` that can be read, in its order."""
    return [row for line in Tail(run / METRICS).lines() if (row := parse_row(line))]


def _places(logs: list[Path]) -> dict[int, list[tuple[Path, int]]]:
    """Step -> file and first byte of each rank's line, of the last start that took the step."""
    places: dict[int, dict[tuple[int, Path], int]] = defaultdict(dict)
    for path in logs:
        at = 0
        with open(path, "rb") as file:
            for line in file:
                if (row := parse_row(line)) and is_count(start := row.get("start")):
                    places[row["step"]][start, path] = at
                at += len(line)
    return {step: [(path, at) for (start, path), at in each.items() if start == max(each)[0]] for step, each in places.items()}


def _logged(path: Path, place: int) -> dict[tuple[int, int], tuple[int, str]]:
    """Epoch and position -> sample and digest of its draws, of a line of a sample log; empty if it is damaged."""
    with open(path, "rb") as file:
        file.seek(place)
        row = parse_row(file.readline()) or {}
    try:
        return dict(zip(zip(row["epoch"], row["position"]), zip(row["sample"], row["augmentation"])))
    except (KeyError, TypeError):
        return {}
