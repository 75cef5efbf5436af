"""What an audit finds in the records of a run, without training anything again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.checkpoint.folder import step_folder
from pipeline.checkpoint.manifest import CheckpointManifest
from pipeline.config import Config, load_config
from pipeline.loader.batches import TrainBatches
from pipeline.logs.run_files import augmentation_digests
from pipeline.optim.build import learning_rate
from pipeline.shards.mixed_set import open_training_set
from pipeline.stream.schedule import make_schedule
from pipeline.training.folder import config_hash
from support.forging import (
    edit_config,
    edit_rows,
    edit_samples,
    edit_starts,
    edit_state,
    evaluation,
    found_in,
    lines,
    without_tensors,
    write_lines,
)

pytestmark = pytest.mark.multiprocess


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
