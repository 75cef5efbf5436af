"""`pervit audit`: an honest run agrees with itself, whatever happened to it, and each forgery is found by name."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors import numpy as tensors

from pipeline.audit import replay as replay_module
from pipeline.audit.records import Records
from pipeline.audit.replay import Replay, Window, choose, compare, train_again
from pipeline.checkpoint.folder import saved_steps, step_folder
from pipeline.checkpoint.manifest import CheckpointManifest, checksum
from pipeline.config import Config, load_config
from pipeline.errors import UserError
from pipeline.loader.batches import TrainBatches
from pipeline.logs.run_files import augmentation_digests
from pipeline.optim.build import learning_rate
from pipeline.runs.files import RunFiles
from pipeline.shards.mixed_set import open_training_set
from pipeline.stream.schedule import make_schedule
from pipeline.training.folder import config_hash
from support.ranks import Job, run_forked, train, wait_for_steps
from support.runs import write_small_config
from support.small_run import SMALL_MODEL

pytestmark = pytest.mark.multiprocess
KEYS = ("checkpoint.every_steps=2", "checkpoint.keep_last=9", "train.max_steps=8")


@pytest.fixture(scope="session")
def elastic_run(digits_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Killed after its third step on one process, continued on two, stopped at step 6, and ended on one."""
    folder = tmp_path_factory.mktemp("audit")
    config, run = write_small_config(digits_shards, folder), folder / "run"
    job = train(1, config, run, *KEYS)
    assert job.until(lambda: 2 in saved_steps(run)) and wait_for_steps(job, run, 1)
    job.kill()
    job.wait()
    train(2, config, run, *KEYS, "train.max_steps=6").succeed()
    train(1, config, run, *KEYS).succeed()
    assert saved_steps(run) == [2, 4, 6, 8]
    return run


def audit(run: Path, *words: object, code: int) -> dict:
    """What an audit with this exit code writes down."""
    found, page = run.parent / "audit.json", run.parent / "audit.html"
    result = run_forked("pipeline.audit", run, "--json", found, "--output", page, *words, check=False)
    assert result.returncode == code, result.stdout + result.stderr
    assert "</html>" in page.read_text()
    return json.loads(found.read_text())


def problems(run: Path, *words: object) -> dict[str, list[str]]:
    """What an audit finds, by the part that differs."""
    told = audit(run, *words, code=1)
    assert not told["agrees"]
    found = {part["name"]: part["problems"] for part in told["findings"] if part["problems"]}
    return found | {"trained again": [problem for part in told["replays"] for problem in part["problems"]]}


@pytest.mark.long
def test_a_run_that_was_killed_and_moved_agrees(elastic_run: Path) -> None:
    """On as many processes as each window had, every number comes again bit for bit."""
    told = audit(elastic_run, "--steps", "1,5,8", code=0)
    assert [part["name"] for part in told["findings"]] == ["checkpoints", "config", "code", "data", "metrics", "samples"]
    windows = [(again["window"]["first"], again["window"]["last"], again["window"]["processes"]) for again in told["replays"]]
    assert windows == [(0, 2, 1), (4, 6, 2), (6, 8, 1)]
    for again in told["replays"]:
        assert again["exact"] and again["largest"]["metrics"][0] == again["largest"]["tensors"][0] == 0.0, again
        assert again["compared"]["metrics"] >= 2 * 8 and again["compared"]["tensors"] > 300


def test_on_other_processes_it_agrees_within_bounds(elastic_run: Path) -> None:
    (again,) = audit(elastic_run, "--steps", "5", "--processes", "1", code=0)["replays"]
    assert not again["exact"] and 0 < again["largest"]["metrics"][0] < 1e-4


def test_a_run_of_more_threads_comes_again_with_as_many(digits_shards: Path, tmp_path: Path) -> None:
    """A convolution on two threads adds in another order than on one, which is what this audit would have by itself."""
    config, run = write_small_config(digits_shards, tmp_path), tmp_path / "run"
    larger = ("model.switches.widths=[32,32,32,32]", "model.image_size=64", "train.max_steps=4", "checkpoint.every_steps=2")
    Job(1, "--config", config, f"output_dir={run}", *SMALL_MODEL, *larger, SLURM_CPUS_PER_TASK="2").succeed()
    (start,) = json.loads((run / "environment.json").read_text())
    assert start["cpu_threads"] == min(2, len(os.sched_getaffinity(0))) and re.fullmatch(r".+, \w+", start["cpu"])
    (again,) = audit(run, "--windows", "1", code=0)["replays"]
    assert again["exact"] and not again["unlike"] and again["largest"]["tensors"][0] == 0.0, again


def test_on_another_cpu_it_agrees_within_bounds(elastic_run: Path, tmp_path: Path) -> None:
    """What a start on another machine has trained is a window of its own, and is not called forged for its rounding."""
    run = Path(shutil.copytree(elastic_run, tmp_path / "run"))
    path, config = run / "environment.json", load_config(run / "config.yaml")
    starts = json.loads(path.read_text())
    path.write_text(json.dumps([{**start, "cpu": "another, NEON"} for start in starts]))
    (again,) = audit(run, "--steps", "8", code=0)["replays"]
    assert not again["exact"] and again["unlike"] == ["cpu"]
    assert "bit for bit; within bounds, its cpu being other than the run" in (tmp_path / "audit.html").read_text()
    assert "everything agrees, 1 of 1 window only within bounds" in (tmp_path / "audit.html").read_text()
    shutil.rmtree(step_folder(run, 4))
    for cpu, end in {"another, NEON": 4, starts[-2]["cpu"]: 6}.items():
        path.write_text(json.dumps([*starts[:-1], {**starts[-2], "first_step": 5, "cpu": cpu}, starts[-1]]))
        (window,) = choose(Records(RunFiles(run), config), 1, 500, [3], None)
        assert (window.first, window.last, window.processes) == (2, end, 2)


def test_a_run_that_trains_is_not_audited(elastic_run: Path, digits_shards: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(elastic_run, tmp_path / "run"))
    job = train(1, elastic_run.parent / "config.yaml", run, *KEYS, "train.max_steps=100000")
    assert wait_for_steps(job, run, 1)
    refused = run_forked("pipeline.audit", run, check=False)
    job.signal(signal.SIGKILL)
    assert refused.returncode == 2 and "must be a run that nobody trains, got one that is running at step" in refused.stderr


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def change_row(run: Path, key: str, by: float, step: int = 5) -> None:
    """Edit the row of a step, or of its evaluation."""
    rows = lines(run / "metrics.jsonl")
    row = next(row for row in rows if row["step"] == step and key in row)
    row[key] += by
    write_lines(run / "metrics.jsonl", rows)


def drop_row(run: Path) -> None:
    write_lines(run / "metrics.jsonl", [row for row in lines(run / "metrics.jsonl") if row["step"] != 3])


def change_config(run: Path) -> None:
    text = (run / "config.yaml").read_text()
    assert "  weight_decay: 0.05" in text
    (run / "config.yaml").write_text(text.replace("  weight_decay: 0.05", "  weight_decay: 0.04"))


def change_version(run: Path) -> None:
    starts = json.loads((run / "environment.json").read_text())
    starts[1] |= {"git_commit": "0" * 40}
    (run / "environment.json").write_text(json.dumps(starts))


def change_sample(run: Path) -> None:
    log = run / "samples" / "rank-00000.jsonl"
    rows = lines(log)
    rows[-1]["sample"][0] ^= 1
    rows[-1]["augmentation"][1] = "0" * 16
    write_lines(log, rows)


def flip_bit(run: Path) -> None:
    path = step_folder(run, 8) / "part-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def forge_weights(run: Path) -> None:
    """Other weights with right checksums, as somebody does who knows how."""
    folder = step_folder(run, 8)
    path, manifest = folder / "part-00000.safetensors", CheckpointManifest.read(folder)
    content = tensors.load_file(path)
    name = next(name for name in content if name.startswith("weight/head"))
    content[name] = np.nextafter(content[name], np.float32(9))
    tensors.save_file(content, path)
    manifest.files[0] = checksum(path)
    (folder / "checkpoint.json").write_text(manifest.to_text())


FORGERIES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "row removed": (drop_row, "metrics", "metrics.jsonl has no row of step 3"),
    "learning rate": (lambda run: change_row(run, "lr", 1e-9), "metrics", "metrics.jsonl: lr of step 5 must be"),
    "config": (change_config, "config", "optim.weight_decay is 0.05 in the checkpoint of step 8, but 0.04 in config.yaml"),
    "code": (change_version, "code", f"git_commit of start 2 is {'0' * 40}, here "),
    "history": (lambda run: (run / "environment.json").write_text("["), "code", "environment.json is damaged"),
    "sample": (change_sample, "samples", "step 8, epoch 0, position"),
    "bit": (flip_bit, "checkpoints", "part-00000.safetensors was changed after it was written"),
    "loss": (lambda run: change_row(run, "loss", 1e-7), "trained again", "loss of step 5 is "),
    "accuracy": (lambda run: change_row(run, "top1", 1e-3, 6), "trained again", "top1 of step 6 (model) is "),
    "weights": (forge_weights, "trained again", "weight of head.weight in step-00000008 differs by"),
}


_TRAINED = ("loss", "accuracy")  # what is found by training steps again, as of "weights"


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long if name in _TRAINED else ()) for name in FORGERIES])
def test_a_forgery_is_found(elastic_run: Path, tmp_path: Path, name: str) -> None:
    forge, where, sentence = FORGERIES[name]
    run = Path(shutil.copytree(elastic_run, tmp_path / "run"))
    forge(run)
    words = ("--steps", "8" if name == "weights" else "5") if where == "trained again" else ("--windows", "0")
    found = problems(run, *words)
    assert any(sentence in problem for problem in found.pop(where)), found
    assert not any(found.values()) or name == "accuracy", found


def test_a_swapped_shard_is_found(elastic_run: Path, copied_shards: Path, tmp_path: Path) -> None:
    """Another file of the same size, in the place of a shard."""
    tar = sorted(copied_shards.glob("train*.tar"))[0]
    content = bytearray(tar.read_bytes())
    content[:] = content[512:] + content[:512]
    tar.write_bytes(content)
    found = problems(elastic_run, "--windows", "0", "--data", copied_shards)
    assert list(found) == ["data", "trained again"] and tar.name in found["data"][0]


@pytest.fixture
def run(elastic_run: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be changed."""
    return Path(shutil.copytree(elastic_run, tmp_path / "run"))


def records_of(run: Path) -> Records:
    return Records(RunFiles(run), load_config(run / "config.yaml"))


def found_in(run: Path) -> dict[str, list[str]]:
    """Problems by the kind of record."""
    return {finding.name: finding.problems for finding in records_of(run).findings() if finding.problems}


def edit_rows(run: Path, edit: Callable[[list[dict]], Any]) -> None:
    rows = lines(run / "metrics.jsonl")
    edit(rows)
    write_lines(run / "metrics.jsonl", rows)


def edit_starts(run: Path, edit: Callable[[list[dict]], Any]) -> None:
    path = run / "environment.json"
    starts = json.loads(path.read_text())
    edit(starts)
    path.write_text(json.dumps(starts))


def edit_state(run: Path, step: int, **values: Any) -> None:
    """Another state with a right checksum."""
    folder = step_folder(run, step)
    manifest = CheckpointManifest.read(folder)
    manifest = replace(manifest, state=replace(manifest.state, **values))
    (folder / "checkpoint.json").write_text(manifest.to_text())


def edit_samples(run: Path, rank: int, edit: Callable[[list[dict]], Any]) -> None:
    path = run / "samples" / f"rank-{rank:05d}.jsonl"
    rows = lines(path)
    edit(rows)
    write_lines(path, rows)


def without_tensors(run: Path, *prefixes: str) -> None:
    """Remove tensors from the last checkpoint, with right checksums; of the optimizer also what the manifest says of it."""
    folder = step_folder(run, 8)
    manifest, path = CheckpointManifest.read(folder), folder / "part-00000.safetensors"
    kept = {name: value for name, value in tensors.load_file(path).items() if not name.startswith(prefixes)}
    tensors.save_file(kept, path)
    manifest.files[0] = checksum(path)
    manifest = replace(manifest, optimizer_state=[]) if "optimizer." in prefixes else manifest
    (folder / "checkpoint.json").write_text(manifest.to_text())


def evaluation(rows: list[dict], step: int, weights: str = "model") -> dict:
    return next(row for row in rows if row["step"] == step and row.get("weights") == weights)


def edit_config(run: Path, section: str, key: str, value: Any) -> None:
    path = run / "config.yaml"
    config = yaml.safe_load(path.read_text())
    config[section][key] = value
    path.write_text(yaml.safe_dump(config))


def swap_classes(run: Path) -> None:
    state = CheckpointManifest.read(step_folder(run, 8)).state
    edit_state(run, 8, classes=[*state.classes[1::-1], *state.classes[2:]])


def repeat_a_sample(row: dict) -> None:
    for key in ("epoch", "position", "sample", "augmentation"):
        row[key].append(row[key][0])


def repeat_in_two_logs(run: Path) -> None:
    """The other rank's images of step 5 once more."""
    (row,) = (row for row in lines(run / "samples" / "rank-00001.jsonl") if row["step"] == 5)
    edit_samples(run, 0, lambda rows: next(each for each in rows if each["step"] == 5 and each["start"] == 2).update(row))


def add_garbage(run: Path) -> None:
    with open(run / "metrics.jsonl", "a") as file:
        file.write("garbage {\n")


FORGED_RECORDS: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "no history": (
        lambda run: (run / "environment.json").unlink(),
        "code",
        "environment.json must have 3 starts, got 0",
    ),
    "a start removed": (
        lambda run: edit_starts(run, lambda starts: starts.pop()),
        "code",
        "environment.json must have 3 starts, got 2",
    ),
    "no packages": (
        lambda run: edit_starts(run, lambda starts: starts[1].pop("packages")),
        "code",
        "start 2 of environment.json has no torch",
    ),
    "packages of another kind": (
        lambda run: edit_starts(run, lambda starts: starts[1].update(packages="x")),
        "code",
        "start 2 of environment.json has no torch",
    ),
    "no commit": (
        lambda run: edit_starts(run, lambda starts: starts[2].pop("git_commit")),
        "code",
        "start 3 of environment.json has no git_commit",
    ),
    "other settings": (
        lambda run: edit_starts(run, lambda starts: starts[2]["settings"].update({"log.samples": False})),
        "config",
        "log.samples is True in the checkpoint of step 8, but False in environment.json",
    ),
    "no average": (
        lambda run: without_tensors(run, "ema/", "ema_buffer/"),
        "checkpoints",
        "step-00000008 must have tensors of ema, got none",
    ),
    "no optimizer state": (
        lambda run: without_tensors(run, "optimizer."),
        "checkpoints",
        "step-00000008 must have tensors of optimizer, got none",
    ),
    "no best": (
        lambda run: edit_state(run, 8, best=None),
        "checkpoints",
        "step-00000008: best must be {'top1': ",
    ),
    "another best": (
        lambda run: edit_state(run, 8, best={**CheckpointManifest.read(step_folder(run, 8)).state.best, "step": 8}),
        "checkpoints",
        "step-00000008: best must be {'top1': ",
    ),
    "classes": (swap_classes, "data", "first different at index 0: '1' and '0'"),
    "a free key": (
        lambda run: edit_config(run, "eval", "batch_size", 64),
        "config",
        "eval.batch_size is 128 in the checkpoint of step 8, but 64 in config.yaml",
    ),
    "an average's evaluation removed": (
        lambda run: edit_rows(run, lambda rows: rows.remove(evaluation(rows, 8, "ema"))),
        "metrics",
        "metrics.jsonl has no row of step 8 (ema)",
    ),
    "an evaluation removed": (
        lambda run: edit_rows(run, lambda rows: [rows.remove(evaluation(rows, 6, each)) for each in ("model", "ema")]),
        "metrics",
        "metrics.jsonl has no row of step 6 (model)",
    ),
    "an evaluation invented": (
        lambda run: edit_rows(run, lambda rows: rows.append({**evaluation(rows, 6), "step": 7, "samples": 112})),
        "metrics",
        "metrics.jsonl has a row of step 7 (model), where none is due",
    ),
    "an evaluation of nowhere": (
        lambda run: edit_rows(run, lambda rows: rows.append({**evaluation(rows, 6), "step": 10**12})),
        "metrics",
        "metrics.jsonl has a row of step 1000000000000 (model), where none is due",
    ),
    "an evaluation's epoch": (
        lambda run: edit_rows(run, lambda rows: evaluation(rows, 6).update(epoch=99)),
        "metrics",
        "metrics.jsonl: epoch of step 6 (model) must be 0.06",
    ),
    "hits": (
        lambda run: edit_rows(run, lambda rows: evaluation(rows, 8).update(correct1=1, class_correct=[])),
        "metrics",
        "metrics.jsonl: correct1 of step 8 (model) must be 0, got 1",
    ),
    "hits of classes": (
        lambda run: edit_rows(run, lambda rows: evaluation(rows, 8)["class_correct"].insert(0, 1)),
        "metrics",
        "metrics.jsonl: correct1 of step 8 (model) must be ",
    ),
    "a second row": (
        lambda run: edit_rows(run, lambda rows: rows.insert(4, {**rows[4], "loss": 1.0})),
        "metrics",
        "metrics.jsonl has two rows of step 5, which differ",
    ),
    "a line of no row": (add_garbage, "metrics", "1 line of metrics.jsonl cannot be read"),
    "samples removed": (lambda run: shutil.rmtree(run / "samples"), "samples", "samples/ has no line of step 1"),
    "a sample twice in a line": (
        lambda run: edit_samples(run, 0, lambda rows: repeat_a_sample(rows[-1])),
        "samples",
        "was trained on 2 times",
    ),
    "a line twice": (
        lambda run: edit_samples(run, 0, lambda rows: rows.append(rows[-1])),
        "samples",
        "was trained on 2 times",
    ),
    "samples of the other rank": (repeat_in_two_logs, "samples", "was trained on 2 times"),
}


@pytest.mark.parametrize("name", FORGED_RECORDS)
def test_forged_records_are_found(run: Path, name: str) -> None:
    """In the records that it was made in, or in those that follow from it."""
    forge, where, sentence = FORGED_RECORDS[name]
    assert not found_in(run)
    forge(run)
    found = found_in(run)
    assert any(sentence in problem for problem in found[where]), found


def test_a_swapped_validation_shard_is_found(run: Path, copied_shards: Path) -> None:
    (tar,) = copied_shards.glob("val*.tar")
    content = tar.read_bytes()
    tar.write_bytes(content[512:] + content[:512])
    edit_config(run, "data", "path", str(copied_shards))
    found = found_in(run)
    assert list(found) == ["data"] and tar.name in found["data"][0]


def test_a_run_whose_records_cannot_be_read_is_no_traceback(run: Path) -> None:
    for step in (2, 4, 6, 8):
        (step_folder(run, step) / "checkpoint.json").write_text("{")
    (run / "metrics.jsonl").write_text("")
    shutil.rmtree(run / "samples")
    assert len(found_in(run)["checkpoints"]) == 4


def test_skipped_steps_have_no_samples(run: Path) -> None:
    """A step whose gradient is not finite is skipped, and no sample of it is logged."""

    def skip(rows: list[dict]) -> None:
        for row in rows:
            if row["step"] >= 7 and "lr" in row:
                row["skipped_steps"] = 1

    edit_rows(run, skip)
    edit_state(run, 8, skipped_steps=1)
    edit_samples(run, 0, lambda rows: rows.remove(next(row for row in rows if row["step"] == 7)))
    assert not found_in(run)


def test_samples_may_be_logged_from_a_start_on(run: Path) -> None:
    """`log.samples` is switched on by the last start."""
    for step in (2, 4, 6):
        config = CheckpointManifest.read(step_folder(run, step)).state.config
        edit_state(run, step, config={**config, "log": {**config["log"], "samples": False}})
    edit_starts(run, lambda starts: [start["settings"].update({"log.samples": False}) for start in starts[:2]])
    (run / "samples" / "rank-00001.jsonl").unlink()
    write_lines(log := run / "samples" / "rank-00000.jsonl", [row for row in lines(log) if row["step"] > 6])
    assert not found_in(run)


def test_a_kill_between_the_lines_of_two_ranks(run: Path) -> None:
    """Of the last step, which no checkpoint holds, one of two ranks has a line."""
    for step in (6, 8):
        shutil.rmtree(step_folder(run, step))
    edit_rows(run, lambda rows: rows.__delitem__(slice(5, None)))
    edit_starts(run, lambda starts: starts.pop())
    (run / "events.jsonl").unlink()
    config = CheckpointManifest.read(step_folder(run, 4)).state.config
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    edit_samples(run, 0, lambda rows: rows.__delitem__(slice(-2, None)))  # of the last start, steps 7 and 8
    assert not found_in(run)
    edit_samples(run, 1, lambda rows: rows.pop())
    assert not found_in(run)
    edit_samples(run, 1, lambda rows: rows.pop())
    assert not found_in(run)
    edit_samples(run, 1, lambda rows: rows.pop())  # of step 4, which a checkpoint holds
    assert "of step 4" in str(found_in(run)["samples"]) or "step 4," in str(found_in(run)["samples"])


def test_a_damaged_image_changes_what_it_was_mixed_with(run: Path) -> None:
    """Its substitute, and the partner of another image: as the loader asks for them again."""
    config = load_config(run / "config.yaml")
    train_set = open_training_set(config.data.path, {})
    batches = TrainBatches.for_one_process(train_set, config, config.train.global_batch_size)
    bad = int(batches.request(7).index[0])
    request = batches.request(7, {bad: (bad + 1) % len(train_set)})
    changed = augmentation_digests(request)
    before = augmentation_digests(batches.request(7))
    assert sum(was != now for was, now in zip(before, changed)) >= 1 and request.index[0] != bad
    known = dict(zip(zip(request.epoch.tolist(), request.position.tolist()), zip(request.index.tolist(), changed)))

    def write(rows: list[dict]) -> None:
        row = rows[-1]
        assert row["step"] == 8
        pairs = [known[place] for place in zip(row["epoch"], row["position"])]
        row["sample"], row["augmentation"] = map(list, zip(*pairs))

    edit_samples(run, 0, write)
    assert "must be sample" in str(found_in(run)["samples"])
    edit_state(run, 8, bad_samples={str(bad): "cannot be read"})
    assert not found_in(run)
    edit_samples(run, 0, lambda rows: rows[-1]["sample"].__setitem__(rows[-1]["sample"].index(int(request.index[0])), bad + 7))
    assert "must be sample" in str(found_in(run)["samples"])


def test_an_accepted_change_is_none_of_earlier_steps(run: Path) -> None:
    """The last start has doubled the epochs: its steps have another learning rate, those before keep theirs."""
    early = load_config(run / "config.yaml").with_values({"optim.warmup_epochs": 0.02})  # of two steps
    late = early.with_values({"train.epochs": 20, "checkpoint.accept": ["train.epochs"]})
    for step in (2, 4, 6, 8):
        saved = (late if step == 8 else early).with_values({"train.max_steps": 8 if step in (2, 8) else 6})
        edit_state(run, step, config=saved.model_dump(mode="json"), config_hash=config_hash(saved))
    (run / "config.yaml").write_text(yaml.safe_dump(late.model_dump(mode="json")))

    def anneal(rows: list[dict], config: Config) -> None:
        its = make_schedule(config, 1438, 1.0)
        for row in rows:
            if "lr" in row and (row["step"] <= 6 or config is late):
                row["lr"] = learning_rate(row["step"] - 1, its.steps_per_epoch, its.epochs, its.global_batch_size, config.optim)

    edit_rows(run, lambda rows: anneal(rows, late))
    assert "lr of step 5" in str(found_in(run)["metrics"])
    edit_rows(run, lambda rows: anneal(rows, early))
    assert not found_in(run)


def compared(run: Path, again: Path, first: int, last: int) -> Replay:
    """What two runs differ in, as if the one was a window of the other, trained again on the same machine."""
    replay = Replay(Window(first, last, 1, 0), exact=True)
    compare(records_of(run), again, replay)
    return replay


def test_what_only_one_side_has(run: Path, elastic_run: Path) -> None:
    """Rows, columns and tensors."""
    assert not compared(run, elastic_run, 4, 8).problems
    without_tensors(run, "buffer/", "ema_buffer/")
    assert "is of another model or optimizer" in str(compared(run, elastic_run, 6, 8).problems)
    assert "is of another model or optimizer" in str(compared(elastic_run, run, 6, 8).problems)
    edit_rows(run, lambda rows: evaluation(rows, 6, "ema").pop("top5"))
    edit_rows(run, lambda rows: rows.remove(evaluation(rows, 6, "model")))
    edit_rows(run, lambda rows: rows.remove(evaluation(rows, 8, "model")))
    sentences = compared(run, elastic_run, 4, 8).problems
    assert any(sentence.startswith("metrics.jsonl has no row of step 6 (model)") for sentence in sentences), sentences
    assert any(sentence.startswith("top5 of step 6 (ema) is missing in the run, but ") for sentence in sentences), sentences
    assert "step 8 (model)" not in str(sentences)  # the window's own end
    assert any("metrics.jsonl has a row of step 6 (model)" in each for each in compared(elastic_run, run, 4, 8).problems)


def test_an_evaluation_that_another_machine_has_made_up_for(run: Path, elastic_run: Path) -> None:
    """The start after step 6 is on one process, those before on two: its sums are others'. It can only have what it wrote itself."""
    edit_rows(run, lambda rows: evaluation(rows, 6).update(loss=2.3))
    assert "loss of step 6 (model)" in str(compared(run, elastic_run, 4, 6).problems)
    edit_rows(run, lambda rows: evaluation(rows, 6).update(time=evaluation(rows, 8)["time"]))
    assert not compared(run, elastic_run, 4, 6).problems
    assert "loss of step 6 (model)" in str(compared(run, elastic_run, 4, 8).problems)
    edit_rows(run, lambda rows: rows[5].update(loss=2.5, time=rows[-1]["time"]))
    assert compared(run, elastic_run, 4, 6).problems[0].startswith("loss of step 6 is 2.5")


def test_how_many_bad_samples_are_known_depends_on_time(run: Path, elastic_run: Path) -> None:
    edit_rows(run, lambda rows: rows[4].update(bad_samples=3))
    assert not compared(run, elastic_run, 4, 6).problems


def test_what_cannot_be_trained_again_is_no_forgery(run: Path) -> None:
    told = audit(run, "--steps", "5", "--processes", "3", code=2)
    assert not told["agrees"] and not any(part["problems"] for part in told["findings"])
    (again,) = told["replays"]
    assert "train.global_batch_size must be a multiple of 12 for 3 processes" in again["failed"] and not again["problems"]
    page = (run.parent / "audit.html").read_text()
    assert "what was compared agrees, 1 of 1 window not trained again" in page and "not trained again: train.global" in page


def test_how_a_window_is_started(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the settings of the start that took its steps, the sets and the cache of the newest, and a checkpoint that can be written."""
    edit_starts(run, lambda starts: starts[1]["settings"].update({"train.micro_batch_size": 8}))
    records = records_of(run)
    newest = {"cache": "/cache", "cache_gib": 7.0, "mix": {"elsewhere": 0.5}}
    records.config = records.config.with_values({f"data.{key}": value for key, value in newest.items()})
    os.chmod(step_folder(run, 4), 0o555)
    monkeypatch.setattr(replay_module.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 3))
    with pytest.raises(UserError, match="the training ended with exit code 3: no output"):
        train_again(records, Replay(Window(4, 6, 2, 1)), tmp_path / "again", False)
    os.chmod(step_folder(run, 4), 0o755)
    recipe = yaml.safe_load((tmp_path / "again" / "config.yaml").read_text())
    assert recipe["train"]["micro_batch_size"] == 8 and recipe["train"]["max_steps"] == 6
    assert {key: recipe["data"][key] for key in newest} == newest
    copy = step_folder(tmp_path / "again" / "run", 4)
    assert os.stat(copy).st_mode & 0o200 and not CheckpointManifest.read(copy).state.evaluation_due


def test_a_run_in_a_bucket(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of all its checkpoints are fetched, not only those of the newest."""
    pytest.importorskip("obstore", reason="needs the extra `remote`")
    from pipeline.checkpoint.bucket import RunStore
    from pipeline.stores.place import RemotePath
    from support.stores import BUCKET, aws_environment, s3_server, upload

    with s3_server(monkeypatch) as port:
        url = f"s3://{BUCKET}/{tmp_path.name}"
        upload(run, tmp_path.name)
        upload(run / "samples", f"{tmp_path.name}/samples")
        RunStore(RemotePath(url)).bring_together(run, "environment.json")
        outputs = ("--output", tmp_path / "audit.html", "--json", tmp_path / "audit.json")
        variables = {**aws_environment(port), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        told = run_forked("pipeline.audit", url, "--windows", "0", *outputs, **variables)
        assert "everything agrees" in told.stdout and json.loads((tmp_path / "audit.json").read_text())["agrees"]
