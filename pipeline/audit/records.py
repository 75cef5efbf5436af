"""Compare what a run has written with what follows from its config, and with itself; nothing is trained.

The learning rate of a step, its samples and all that is drawn for them are pure functions of the config and the data set, so that every row
of ``metrics.jsonl`` and of the sample logs can be computed again.
"""

import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.checkpoint.manifest import RunState, find_damage
from pipeline.checkpoint.parts import EMA, find_gaps, find_not_finite, read_headers
from pipeline.config import Config, config_from_dict, flatten, is_free
from pipeline.config.train_sections import BUILT_IN_OPTIMIZERS
from pipeline.errors import counted
from pipeline.loader.batches import TrainBatches
from pipeline.loader.reader import BadSamples
from pipeline.logs.run_files import SETTINGS, augmentation_digests, code_version
from pipeline.models.weights.transfer import first_difference
from pipeline.optim.build import learning_rate
from pipeline.runs import CONFIG, ENVIRONMENT, METRICS, SAMPLES
from pipeline.runs.files import RunFiles
from pipeline.runs.rows import Row, Tail, is_count, kind_of, lines_left_out, parse_row
from pipeline.shards.mixed_set import open_training_set
from pipeline.shards.shard_set import ShardSet
from pipeline.stream.samples import DamagedSample, images_per_epoch
from pipeline.stream.schedule import Schedule, make_schedule
from pipeline.terminal import Stage
from pipeline.training.folder import changes, config_hash

_NAMED = 5  # problems of a kind that are listed
# Columns that tell how fast a step was, or where, not what it computed; a bad sample is known as soon as it was read ahead.
OF_TIME = tuple("time data_wait slowest_ images_per_second mfu memory_ peak_memory_ store_ upload_ seconds bad_samples".split())


@dataclass(frozen=True)
class Finding:
    """What one kind of record was compared with, and what does not agree."""

    name: str
    compared: str
    problems: list[str] = field(default_factory=list)


class Records:
    """The records of a run. Raises UserError: it has no readable config or no checkpoint, or its data set cannot be opened.
    ``config``: of ``config.yaml``, with the place of the data. ``steps``: the row of each step."""

    def __init__(self, files: RunFiles, config: Config) -> None:
        self.files, self.config = files, config
        self.manifests = {found.step: found.manifest for found in files.checkpoints if found.manifest}
        self.configs = {
            step: config_from_dict(manifest.state.config, f"the checkpoint of step {step}")
            for step, manifest in self.manifests.items()
        }
        self.damaged = set[int]()  # steps of checkpoints, which :meth:`checkpoints` has found
        self.train_set = open_training_set(config.data.path, config.data.mix)
        whole = [each.with_values({"train.max_steps": None}) for each in (*self.configs.values(), config)]
        self.end = end = max(self._schedule(each).last_step for each in whole)  # no row is of a later step
        self.rows, self.left_out = rows, _ = read_rows(files.path)
        self.steps = {row["step"]: row for row in rows if kind_of(row) == "step" and "loss" in row and row["step"] <= end}
        self._taken_by: dict[tuple[int, int], tuple[Config, Schedule]] = {}

    def findings(self) -> Iterator[Finding]:
        """One for each kind of record."""
        for kind in (self.checkpoints, self.run_config, self.code, self.data, self.metrics, self.samples):
            with Stage(f"comparing {kind.__name__}"):
                compared, *problems = kind()
            more = len(problems) - _NAMED
            problems[_NAMED:] = [f"... and {counted(more, 'more difference')}"] if more > 0 else []
            yield Finding(kind.__name__.removeprefix("run_"), compared, problems)

    def start_of(self, step: int) -> dict[str, Any]:
        """What environment.json has of the start that took a step; empty if it has none."""
        return next((start for start in reversed(self.files.starts) if first_step(start) <= step), {})

    def config_of(self, step: int) -> tuple[Config, Schedule]:
        """The config by which a step was taken, and its schedule: that of the next checkpoint, else of the newest start, with the settings
        of the start that took it. Raises UserError: these are none."""
        saved, start = next((saved for saved in self.configs if saved >= step), -1), self.start_of(step)
        if (key := (saved, first_step(start))) not in self._taken_by:
            config, own = self.configs.get(saved, self.config), start.get("settings")
            given = {key: own[key] for key in SETTINGS if key in own} if isinstance(own, dict) else {}
            config = config_from_dict(config.with_values(given).model_dump(mode="json"), f"of step {step}, with {ENVIRONMENT}")
            self._taken_by[key] = config, self._schedule(config)
        return self._taken_by[key]

    def _schedule(self, config: Config) -> Schedule:
        return make_schedule(config, images_per_epoch(self.train_set), self.train_set.subset)

    # What is compared, then what differs.

    def checkpoints(self) -> Iterator[str]:
        size = sum(found.bytes or 0 for found in self.files.checkpoints)
        yield f"{counted(len(self.files.checkpoints), 'checkpoint')} ({size / 2**20:,.0f} MiB) with checksums and records"
        for found in self.files.checkpoints:
            if found.manifest is None:
                yield found.problem or f"{found.folder} cannot be read"
                continue
            state, files, folder, config = found.manifest.state, found.manifest.files, found.folder, self.configs[found.step]
            damage = find_damage(folder, files) or find_gaps(folder, found.manifest) or find_not_finite(folder, files)
            self.damaged |= {found.step} if damage else set()
            yield from damage
            for name, due in self._due(state).items():
                if (got := getattr(state, name)) != due:
                    yield f"{folder}: {name} must be {due}, got {got}"
            taken = state.step > state.skipped_steps and config.optim.name in BUILT_IN_OPTIMIZERS  # all of which keep something
            there = {entry.key.replace(".", "/").partition("/")[0] for entry in ([] if damage else read_headers(folder, files))}
            for name, needed in {EMA: config.train.ema_decay, "optimizer": taken}.items():
                if needed and not damage and name not in there:
                    yield f"{folder} must have tensors of {name}, got none"

    def _due(self, state: RunState) -> dict[str, Any]:
        """What the state of a checkpoint must be, by its config, the schedule and the log."""
        scored = [row for row in self.rows if kind_of(row) == "evaluation" and row["step"] <= state.step - state.evaluation_due]
        top = max(scored, key=lambda row: row["top1"], default=None)  # the first of equal ones, as a run notes it
        return {
            "config_hash": config_hash(self.configs[state.step]),
            "samples": self._schedule(self.configs[state.step]).samples(state.step),
            "skipped_steps": self.steps.get(state.step, {}).get("skipped_steps", state.skipped_steps),
            "best": top and {key: top[key] for key in ("top1", "step", "weights")},
        }

    def run_config(self) -> Iterator[str]:
        yield f"{CONFIG} with the configs of {counted(len(self.configs), 'checkpoint')}, and the settings of starts"
        chain = [(f"the checkpoint of step {step}", config) for step, config in self.configs.items()]
        last, firsts = (CONFIG, self.config), [first_step(start) for start in self.files.starts]
        # What one start has written is the same in free keys, too, but how to decode, which it settles later. The next start may save a
        # checkpoint again, after an evaluation that was due.
        newest_own = bool(chain and firsts) and max(self.configs) >= firsts[-1]
        pairs = [(*old, *new, new is last and newest_own) for old, new in zip(chain, [*chain[1:], last])]
        own = [(*old, step) for old, step in zip(chain, self.configs) if step + 1 not in firsts]
        pairs += [(before, old, ENVIRONMENT, self.config_of(step)[0], True) for before, old, step in own]
        for before, old, after, new, whole in pairs:
            refused, was = changes(new, old)[1], flatten(old)
            for key, now in flatten(new).items():
                if key in refused or whole and is_free(key) and key not in ("data.path", "data.decode") and was[key] != now:
                    yield f"{key} is {was[key]} in {before}, but {now} in {after}"

    def code(self) -> Iterator[str]:
        starts, known = self.files.starts, {found.problem for found in self.files.checkpoints}
        yield f"{counted(len(starts), 'start')} with the code and the packages here"
        yield from (problem for problem in self.files.problems if problem not in known)  # of environment.json and others
        numbers = (row.get("number") for row in self.files.events if row.get("event") == "start")
        if len(starts) < (begun := max(filter(is_count, numbers), default=1)):
            yield f"{ENVIRONMENT} must have {counted(begun, 'start')}, got {len(starts)}"
        here = code_version(self.config)
        here |= here.pop("packages")
        for number, start in enumerate(starts, 1):
            there = {**start, **(packages if isinstance(packages := start.get("packages"), dict) else {})}
            for key in ("settings", *here):
                if key not in there and "dali" not in key:  # which a machine may have and another not
                    yield f"start {number} of {ENVIRONMENT} has no {key}"
                elif key in here and there.get(key, here[key]) != here[key]:
                    yield f"{key} of start {number} is {there[key]}, here {here[key]}: audit with that version"

    def data(self) -> Iterator[str]:
        sets, now = [*self.train_set.sets, ShardSet(self.config.data.path, "val")], self.train_set.identity()
        shards = counted(sum(len(each.info.shards) for each in sets), "shard")
        yield f"the training set with the checkpoints, and an image of each of {shards} with its checksum"
        accepted = "data" in self.config.checkpoint.accept  # another set than at first
        for step, manifest in list(self.manifests.items())[-1 if accepted else 0 :]:
            was = manifest.state.data
            for key in sorted(key for key in was.keys() | now.keys() if was.get(key) != now.get(key)):
                yield f"{key} is {was.get(key)} in the checkpoint of step {step}, but {now.get(key)} in {self.config.data.path}"
            if others := first_difference(manifest.state.classes, self.train_set.classes):
                yield f"the checkpoint of step {step} and {self.config.data.path} have {others}"
        for each in sets:
            begin = np.flatnonzero(np.diff(each.samples["shard"].astype(np.int64), prepend=-1)).tolist()
            chosen = [random.randrange(first, end) for first, end in zip(begin, [*begin[1:], len(each)])]
            yield from (str(found) for found in each.read_batch(chosen) if isinstance(found, DamagedSample))

    def metrics(self) -> Iterator[str]:
        yield f"{counted(len(self.rows), 'row')} with the schedule: steps and evaluations, samples, epoch, learning rate and scores"
        if self.left_out:
            yield lines_left_out(self.left_out, METRICS)
        newest, last = max(self.manifests, default=0), max([*self.manifests, *self.steps], default=0)
        there: dict[tuple[int, str], Row] = {}
        for row in self.rows:
            (step, kind), (config, its) = place_of(row), self.config_of(row["step"])
            due = {"samples": its.samples(step), "epoch": its.epoch(step)}
            if kind == "step":
                due["lr"] = learning_rate(step - 1, its.steps_per_epoch, its.epochs, its.global_batch_size, config.optim)
            elif kind != "analysis":
                lists = (row.get(key) for key in ("class_correct", "class_count"))
                correct, count = (sum(filter(is_count, each if isinstance(each, list) else [])) for each in lists)
                due |= {"correct1": correct, "count": count, "top1": 100 * correct / max(count, 1)}
            of = f"step {step}" + f" ({kind})" * (kind != "step")
            for key, value in due.items():
                if row.get(key) != value:
                    yield f"{METRICS}: {key} of {of} must be {value}, got {row.get(key)}"
            was, keys = there.setdefault((step, kind), row), (key for key in row if not key.startswith(OF_TIME))
            if was is not row and (was.keys() != row.keys() or any(was[key] != row[key] for key in keys)):
                yield f"{METRICS} has two rows of {of}, which differ"
            if step > last or kind not in ("step", "analysis") and not its.passes(step, config.eval.every_epochs):
                yield f"{METRICS} has a row of {of}, where none is due"
        for step in range(1, last + 1):
            if step not in self.steps:
                yield f"{METRICS} has no row of step {step}"
            config, its = self.config_of(step)
            finished = step < last or step == newest and not self.manifests[newest].state.evaluation_due
            if finished and its.passes(step, config.eval.every_epochs):
                weights = ("model", "ema") if config.train.ema_decay else ("model",)
                yield from (f"{METRICS} has no row of step {step} ({each})" for each in weights if (step, each) not in there)

    def samples(self) -> Iterator[str]:
        places, newest = _places(sorted((self.files.path / SAMPLES).glob("rank-*.jsonl"))), max(self.manifests, default=0)
        if not places and not any(self.config_of(step)[0].log.samples for step in self.steps):
            yield "no sample logs: log.samples was false"
            return
        replaced = sorted({int(sample) for each in self.manifests.values() for sample in each.state.bad_samples})
        bad = BadSamples(self.train_set, len(replaced))
        for sample in replaced:
            bad.add(DamagedSample(sample, ""))
        last = min(max([newest, *places]), self.end)
        while last > newest and len(places.get(last, ())) < count_of(self.start_of(last), "world_size", 1):
            last -= 1  # it was killed before the last of its ranks had written the step
        yield f"the samples and draws of {counted(last, 'step')} with the stream, each once; replaced: {replaced or 'none'}"
        config, skipped = None, 0
        for step in range(1, last + 1):
            before, skipped = skipped, count_of(self.steps.get(step, {}), "skipped_steps", skipped)
            if config is not (its := self.config_of(step)[0]):
                config = its
                sized = stream = TrainBatches.for_one_process(self.train_set, its, its.train.global_batch_size)
            if step not in places and its.log.samples and skipped == before and (step <= newest or step in self.steps):
                yield f"{SAMPLES}/ has no line of step {step}"
            if step not in places or not its.log.samples:
                continue
            found = defaultdict[tuple[int, int], list[tuple[int, str]]](list)
            for path, place in places[step]:
                _add_logged(path, place, found)
            if (side := stream.side(step - 1)) != sized.image_size:
                sized = replace(stream, image_size=side)
            due = [sized.request(step - 1)]
            if not bad.replacement.keys().isdisjoint(due[0].index.tolist()):
                due.append(sized.request(step - 1, bad.replacement))  # unless the image could be read there
            drawn = (list(zip(request.index.tolist(), augmentation_digests(request))) for request in due)
            for epoch, position, *right in zip(due[0].epoch.tolist(), due[0].position.tolist(), *drawn):
                got, (sample, _) = found.pop((epoch, position), []), right[-1]
                where = f"step {step}, epoch {epoch}, position {position}"
                if len(got) != 1:
                    yield f"{where}: sample {sample} was " + (f"trained on {len(got)} times" if got else "not trained on")
                elif got[0][0] not in [sample for sample, _ in right]:
                    yield f"{where}: must be sample {sample}, got {got[0][0]}"
                elif got[0] not in right:
                    yield f"{where}: sample {got[0][0]} was augmented otherwise"
            for place_in_epoch, more in found.items():
                yield from (f"sample {sample} of {place_in_epoch} is not of step {step}" for sample, _ in more)


def read_rows(run: Path) -> tuple[list[Row], int]:
    """The rows of ``metrics.jsonl`` that can be read, in its order, and how many of its lines cannot."""
    parsed = [parse_row(line) for line in Tail(run / METRICS).lines()]
    return (rows := [row for row in parsed if row is not None]), len(parsed) - len(rows)


def place_of(row: Row) -> tuple[int, str]:
    """Step and kind of a row, which for an evaluation is its weights: there is one of each."""
    return row["step"], str(row["weights"]) if (kind := kind_of(row)) in ("evaluation", "damaged") else kind


def count_of(start: dict[str, Any], key: str, otherwise: int) -> int:
    """A count of a start, or of a row; ``otherwise`` if it has none."""
    return value if is_count(value := start.get(key)) else otherwise


def first_step(start: dict[str, Any]) -> int:
    return count_of(start, "first_step", 1)


def _places(logs: list[Path]) -> dict[int, list[tuple[Path, int]]]:
    """Step -> file and first byte of each line, of the last start that took the step."""
    places: dict[int, list[tuple[int, Path, int]]] = defaultdict(list)
    for path in logs:
        at = 0
        with open(path, "rb") as file:
            for line in file:
                if (row := parse_row(line)) and is_count(start := row.get("start")):
                    places[row["step"]].append((start, path, at))
                at += len(line)
    return {step: [(path, at) for start, path, at in each if start == max(each)[0]] for step, each in places.items()}


def _add_logged(path: Path, place: int, found: dict[tuple[int, int], list[tuple[int, str]]]) -> None:
    """Add what a line of a sample log has, epoch and position -> sample and digest of its draws; nothing if it is damaged."""
    with open(path, "rb") as file:
        file.seek(place)
        row = parse_row(file.readline()) or {}
    with suppress(KeyError, TypeError, ValueError):
        for epoch, position, *drawn in zip(*(row[key] for key in ("epoch", "position", "sample", "augmentation")), strict=True):
            found[epoch, position].append(tuple(drawn))
