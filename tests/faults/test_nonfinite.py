"""Gradients that are not finite: skipped and counted, then the end with all that repeats the step."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from pipeline.checkpoint.folder import saved_steps
from pipeline.checkpoint.weights import read_weights
from pipeline.errors import USER_ERROR
from pipeline.shards.shard_set import ShardSet
from support.ranks import Job, train
from support.runs import step_rows
from support.small_run import SMALL_MODEL

pytestmark = pytest.mark.multiprocess

SKIPPED = 2
OPTIONS = (
    "optim.lr=1000",  # for an image: 16,000 a step, and the decay of the weights multiplies them by the more
    "optim.lr_batch_size=1",
    "optim.weight_decay=1000",
    "optim.warmup_epochs=0",
    "train.max_steps=40",
    "checkpoint.every_steps=1",
    "checkpoint.keep_last=40",
    f"train.max_skipped_steps={SKIPPED}",
)


@pytest.mark.parametrize("world_size, stage", [(1, 0), (2, 1)])
def test_skipped_then_stopped_and_repeated(
    world_size: int, stage: int, small_run: Path, tmp_path: Path, digits_shards: Path
) -> None:
    """Guards against a week of NaN, weights or BatchNorm statistics that a skipped step has touched, and a dump that does not
    show the fault again."""
    run = tmp_path / "run"
    job = train(world_size, small_run, run, *OPTIONS, f"train.zero_stage={stage}")
    assert job.wait() == [USER_ERROR] * world_size, job.outputs()
    sentence = error_of(job)
    assert "Traceback" not in job.stderr() and f"train.max_skipped_steps is {SKIPPED}" in sentence
    step = int(re.search(r"at step (\d+) the gradient is not finite", sentence)[1])

    rows = {row["step"]: row for row in step_rows(run)}
    last_good = step - SKIPPED - 1
    assert [rows[number]["skipped_steps"] for number in range(last_good, step)] == list(range(SKIPPED + 1))
    assert saved_steps(run)[-1] == step - 1
    good, skipped = (read_weights(run, number) for number in (last_good, step - 1))
    for kind in ("model", "ema"):
        for name, value in good.choose(kind).items():
            assert torch.equal(value, skipped.choose(kind)[name]) and value.isfinite().all(), name

    dump = run / "nonfinite" / f"step-{step:08d}"
    report = json.loads((dump / "report.json").read_text())
    assert report["step"] == step and report["world_size"] == world_size
    keys = [key for micro_batch in report["micro_batches"] for key in micro_batch["keys"]]
    line = json.loads((run / "samples" / "rank-00000.jsonl").read_text().splitlines()[-1])
    shards = ShardSet(digits_shards, "train")
    assert len(set(keys)) == 16 and line["step"] == last_good  # what was skipped was not trained on
    known = {shards.key(index) for index in range(len(shards))}
    assert known.issuperset(keys)

    command = re.search(r"pervit train --config (\S+) repeats the step", sentence)
    again = Job(world_size, "--config", command[1])
    assert again.wait() == [USER_ERROR] * world_size, again.outputs()
    losses = re.compile(r"at step \d+ the gradient is not finite \(losses of its micro-batches: [^)]*\)")
    assert losses.search(error_of(again))[0] == losses.search(sentence)[0]


def test_a_step_that_is_settled_late_ends_the_run_alike(small_run: Path, tmp_path: Path) -> None:
    """Guards against another record where a GPU tells only in the next step that this one was not taken: other weights or
    BatchNorm statistics than those before it, other samples, another count or sentence. No save settles a step at once here."""
    options = (*OPTIONS, "train.zero_stage=0", "log.samples=true", "checkpoint.every_steps=1000")
    found = []
    for program in ("pipeline.train", "support.late_answers"):
        run = tmp_path / program
        job = Job(2, "--config", small_run, f"output_dir={run}", *SMALL_MODEL, *options, module=program)
        assert job.wait() == [USER_ERROR] * 2, job.outputs()
        (dump,) = (run / "nonfinite").iterdir()
        (step,) = saved_steps(dump)
        weights = read_weights(dump, step)
        rows = [[row[key] for key in ("step", "loss", "grad_norm", "skipped_steps")] for row in step_rows(run)]
        samples = [[json.loads(line)[key] for key in ("step", "sample")] for line in _samples(run)]
        report = json.loads((dump / "report.json").read_text())
        state = (weights.state.step, weights.state.samples, weights.state.skipped_steps)
        found.append((error_of(job).replace(str(run), "RUN"), dump.name, step, rows, samples, report, state, weights))
    assert found[0][:-1] == found[1][:-1]
    assert f"train.max_skipped_steps is {SKIPPED}" in found[0][0] and found[0][6][0] == found[0][2] == found[0][5]["step"] - 1
    for kind in ("model", "ema"):
        at_once, late = (weights.choose(kind) for *_, weights in found)
        assert at_once.keys() == late.keys() and all(torch.equal(value, late[name]) for name, value in at_once.items())


def _samples(run: Path) -> list[str]:
    return (run / "samples" / "rank-00000.jsonl").read_text().splitlines()


def error_of(job: Job) -> str:
    """The sentence with which rank 0 ended."""
    (sentence,) = [line for line in job.stderr().splitlines() if line.startswith("error:")]
    return sentence
