"""Compare what a run has written with what follows from its config, and with itself; nothing is trained.

The learning rate of a step, its samples and all that is drawn for them are pure functions of the config and the data set, so that every row
of ``metrics.jsonl`` and of the sample logs can be computed again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.checkpoint.manifest import CheckpointManifest, find_damage
from pipeline.checkpoint.parts import find_gaps, find_not_finite
from pipeline.config import Config, config_from_dict
from pipeline.errors import counted
from pipeline.loader.batches import TrainBatches
from pipeline.logs.run_files import code_version
from pipeline.logs.sample_log import augmentation_digests
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

    Args:
        config: of ``config.yaml``, with the place of the data.
    """

    def __init__(self, files: RunFiles, config: Config) -> None:
        self.files, self.config = files, config
        self.manifests = {found.step: found.manifest for found in files.checkpoints if found.manifest}
        self.configs = {
            step: config_from_dict(manifest.state.config, f"the checkpoint of step {step}")
            for step, manifest in self.manifests.items()
        }
        self.train_set = open_training_set(config.data.path, config.data.mix)
        images, subset = images_per_epoch(self.train_set), self.train_set.subset
        self.schedule = make_schedule(config.with_values({"train.max_steps": None}), images, subset)

    def findings(self) -> Iterator[Finding]:
        """One for each kind of record."""
        kinds: dict[str, Callable[[], tuple[str, Iterator[str]]]] = {
            "checkpoints": self._checkpoints,
            "config": self._config,
            "code": self._code,
            "data": self._data,
            "metrics": self._metrics,
            "samples": self._samples,
        }
        for name, compare in kinds.items():
            with Stage(f"comparing {name}"):
                compared, problems = compare()
                found = list(problems)
            more = [f"... and {counted(len(found) - _NAMED, 'more difference')}"] if len(found) > _NAMED else []
            yield Finding(name, compared, found[:_NAMED] + more)

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

    def _checkpoints(self) -> tuple[str, Iterator[str]]:
        size = sum(found.bytes or 0 for found in self.files.checkpoints)
        compared = f"{counted(len(self.files.checkpoints), 'checkpoint')} ({size / 2**20:,.0f} MiB) with checksums and records"

        def problems() -> Iterator[str]:
            for found in self.files.checkpoints:
                if found.manifest is None:
                    yield found.problem or f"{found.folder} cannot be read"
                    continue
                state, folder = found.manifest.state, found.folder
                damage = find_damage(folder, found.manifest.files) or find_gaps(folder, found.manifest)
                yield from damage or find_not_finite(folder, found.manifest.files)
                if (own := config_hash(self.configs[found.step])) != state.config_hash:
                    yield f"{folder}: config_hash must be {own[:12]}, that of its config, got {state.config_hash[:12]}"
                for name, due in self._due(found.manifest).items():
                    if (got := getattr(state, name)) != due:
                        yield f"{folder}: {name} must be {due}, got {got}"

        return compared, problems()

    def _due(self, manifest: CheckpointManifest) -> dict[str, Any]:
        """What the state of a checkpoint must be, by the schedule and the log."""
        state, row = manifest.state, self.steps.get(manifest.state.step, {})
        due: dict[str, Any] = {"samples": self.schedule.samples(state.step)}
        if "skipped_steps" in row:
            due["skipped_steps"] = row["skipped_steps"]
        scored = [row for row in self.rows if kind_of(row) == "evaluation" and row["step"] <= state.step - state.evaluation_due]
        if state.best and (top := max(scored, key=lambda row: row["top1"], default=None)):
            due["best"] = {**state.best, "top1": top["top1"]}
        return due

    def _config(self) -> tuple[str, Iterator[str]]:
        def problems() -> Iterator[str]:
            chain = [*(("the checkpoint of step " + str(step), config) for step, config in self.configs.items())]
            for (before, old), (after, new) in zip(chain, [*chain[1:], (CONFIG, self.config)]):
                for key, (was, now) in changes(new, old)[1].items():
                    yield f"{key} is {was} in {before}, but {now} in {after}"

        return f"{CONFIG} with the configs of {counted(len(self.configs), 'checkpoint')}", problems()

    def _code(self) -> tuple[str, Iterator[str]]:
        here = code_version(self.config)

        def problems() -> Iterator[str]:
            for number, start in enumerate(self.files.starts, 1):
                there = {key: start.get(key) for key in here}
                known = {**there, **(there.pop("packages") or {})}
                for key, now in {**{key: here[key] for key in there}, **here["packages"]}.items():
                    if known.get(key) not in (None, now):
                        yield f"{key} of start {number} is {known[key]}, here {now}: audit with that version"

        return f"{counted(len(self.files.starts), 'start')} with the code and the packages here", problems()

    def _data(self) -> tuple[str, Iterator[str]]:
        sets, now = self.train_set.sets, self.train_set.identity()
        shards = sum(len(each.info.shards) for each in sets)

        def problems() -> Iterator[str]:
            for step, manifest in self.manifests.items():
                for key in sorted(manifest.state.data.keys() | now.keys()):
                    if (was := manifest.state.data.get(key)) != now.get(key):
                        yield f"{key} of the training set is {was} in the checkpoint of step {step}, but {now.get(key)} in {self.config.data.path}"
            for each in sets:
                begin = np.flatnonzero(np.diff(each.samples["shard"].astype(np.int64), prepend=-1)).tolist()
                chosen = [random.randrange(first, end) for first, end in zip(begin, [*begin[1:], len(each)])]
                yield from (str(found) for found in each.read_batch(chosen) if isinstance(found, DamagedSample))

        return (
            f"the training set with the checkpoints, and an image of each of {counted(shards, 'shard')} with its checksum",
            problems(),
        )

    def _metrics(self) -> tuple[str, Iterator[str]]:
        newest = max(self.manifests, default=0)

        def problems() -> Iterator[str]:
            steps = self.steps
            for step in range(1, max([newest, *steps]) + 1):
                if step not in steps:
                    yield f"{METRICS} has no row of step {step}"
                    continue
                config, its = self.config_of(step), self.schedule
                lr = learning_rate(step - 1, its.steps_per_epoch, its.epochs, its.global_batch_size, config.optim)
                for key, due in {"samples": its.samples(step), "epoch": its.epoch(step), "lr": lr}.items():
                    if steps[step].get(key) != due:
                        yield f"{METRICS}: {key} of step {step} must be {due}, got {steps[step].get(key)}"
            for row in self.rows:
                if kind_of(row) == "damaged":
                    yield f"{METRICS}: the evaluation of step {row['step']} has no top1"
            if self.files.problems:
                yield from self.files.problems

        return (
            f"{counted(len(self.steps), 'row')} with the schedule: none missing, samples, epoch and learning rate",
            problems(),
        )

    def _samples(self) -> tuple[str, Iterator[str]]:
        logs = sorted((self.files.path / SAMPLES).glob("rank-*.jsonl"))
        if not logs:
            return "no sample logs: log.samples was false", iter(())
        places = _places(logs)
        wanted, replaced = range(1, max([*self.manifests, *places]) + 1), dict[int, str]()
        for manifest in self.manifests.values():
            replaced |= {int(number): sentence for number, sentence in manifest.state.bad_samples.items()}
        size = self.config.train.global_batch_size
        stream = TrainBatches.for_one_process(self.train_set, self.config, size)

        def problems() -> Iterator[str]:
            with ExitStack() as opened:
                files = [opened.enter_context(open(path, "rb")) for path in logs]
                for step in wanted:
                    found: dict[tuple[int, int], tuple[int, str]] = {}
                    for number, place in places.get(step, []):
                        files[number].seek(place)
                        line = json.loads(files[number].readline())
                        keys = zip(line["epoch"], line["position"])
                        found |= dict(zip(keys, zip(line["sample"], line["augmentation"])))
                    batches = replace(stream, image_size=stream.side(step - 1))
                    due = batches.request(step - 1)
                    for epoch, position, sample, drawn in zip(
                        due.epoch.tolist(), due.position.tolist(), due.index.tolist(), augmentation_digests(due)
                    ):
                        got = found.pop((epoch, position), None)
                        where = f"step {step}, epoch {epoch}, position {position}"
                        if got is None:
                            yield f"{where}: sample {sample} was not trained on"
                        elif got[0] != sample and sample not in replaced:
                            yield f"{where}: must be sample {sample}, got {got[0]}"
                        elif got[0] == sample and got[1] != drawn:
                            yield f"{where}: sample {sample} was augmented otherwise"
                    for (epoch, position), (sample, _) in found.items():
                        yield f"step {step}: sample {sample} of epoch {epoch}, position {position} is not of this step"

        bad = f"; {counted(len(replaced), 'unreadable image')} replaced: {sorted(replaced)[:_NAMED]}" if replaced else ""
        return f"the samples and draws of {counted(len(wanted), 'step')} with the stream, each once{bad}", problems()


def read_rows(run: Path) -> list[Row]:
    """The rows of ``metrics.jsonl`` that can be read, in its order."""
    return [row for line in Tail(run / METRICS).lines() if (row := parse_row(line))]


def _places(logs: list[Path]) -> dict[int, list[tuple[int, int]]]:
    """Step -> where its lines are, (number of the file, first byte) each: those of the last start that took the step."""
    places: dict[int, tuple[int, list[tuple[int, int]]]] = {}
    for number, path in enumerate(logs):
        at = 0
        with open(path, "rb") as file:
            for line in file:
                row = parse_row(line)
                if row and is_count(start := row.get("start")):
                    before = places.get(row["step"], (0, []))
                    if start >= before[0]:
                        kept = [each for each in before[1] if each[0] != number] if start == before[0] else []
                        places[row["step"]] = (start, [*kept, (number, at)])
                at += len(line)
    return {step: lines for step, (_, lines) in places.items()}
