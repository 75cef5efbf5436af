"""Training in real processes: ZeRO stages agree, resume is exact, evaluation counts are exact, logs are complete."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeline.checkpoint.folder import latest_step, saved_steps
from pipeline.checkpoint.weights import read_weights
from pipeline.config import OptimConfig
from pipeline.optim.build import learning_rate
from pipeline.stream.schedule import Schedule
from support.precisions import RECIPE
from support.ranks import run_forked
from support.runs import evaluation_rows, step_rows
from support.small_run import SMALL_MODEL

pytestmark = pytest.mark.multiprocess

SMALL = SMALL_MODEL[0]


def train(config: Path, run: Path, *overrides: str, processes: int = 2):
    """Train into ``run``; returns its rows without what depends on the clock."""
    arguments = ("--config", config, f"output_dir={run}", SMALL, *overrides)
    run_forked("pipeline.train", *arguments, processes=processes)
    return [(row["step"], row["samples"], row["loss"], row["grad_norm"], row["lr"]) for row in step_rows(run)]


def evaluate(run: Path, file: Path, *options: object, processes: int = 1) -> dict:
    """The result of ``pipeline.evaluate`` on the run's own validation set."""
    data = read_weights(run).state.config["data"]["path"]
    run_forked("pipeline.evaluate", "--checkpoint", run, "--data", data, "--json", file, *options, processes=processes)
    return json.loads(file.read_text())


def assert_equal_weights(a: Path, b: Path) -> None:
    first, second = read_weights(a), read_weights(b)
    for kind in ["model", "ema"] if first.ema else ["model"]:
        expected, found = first.choose(kind), second.choose(kind)
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert torch.equal(value, found[name]), f"{kind} {name}"


@pytest.mark.parametrize("stage", [1, 3])
def test_six_steps_equal_four_and_two(stage: int, small_run: Path, tmp_path: Path) -> None:
    """Guards against a resume that is only nearly exact: step 4 is in the middle of an epoch of 89.9 steps, with gradient
    accumulation, stochastic depth, activation checkpointing and averaged weights all on. The interrupted run also evaluates and
    saves on its way, which must not touch what it trains."""
    options = [
        f"train.zero_stage={stage}",
        f"train.precision={RECIPE}",
        "train.activation_checkpointing=true",
        "train.ema_decay=0.9",
    ]
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    expected = train(small_run, straight, *options, "train.max_steps=6")
    train(small_run, resumed, *options, "train.max_steps=4", "eval.every_epochs=0.02", "checkpoint.every_steps=3")
    assert len(evaluation_rows(resumed)) == 4  # two evaluations, each of the weights and of their average
    assert latest_step(resumed) == 4
    rows = train(small_run, resumed, *options, "train.max_steps=6")
    assert [row[0] for row in rows] == list(range(1, 7))
    assert rows == expected
    assert_equal_weights(straight, resumed)
    saved, statistics = read_weights(resumed), "stem.layers.0.1.running_mean"
    assert saved.ema is not None and not torch.equal(saved.ema[statistics], saved.model[statistics])  # averaged, and resumed so

    if stage < 3:
        return
    for row in evaluation_rows(resumed)[-2:]:  # what was evaluated is what was saved, put together from slices
        saved = evaluate(resumed, tmp_path / "result.json", "--weights", row["weights"])
        assert saved["loss"] == pytest.approx(row["loss"], rel=2e-3), row["weights"]


def test_zero_stages_and_process_counts_agree(small_run: Path, tmp_path: Path) -> None:
    """Guards against a stage that trains something else. One process accumulates four micro-batches of 4 where two
    processes accumulate two each: the same micro-batches, so BatchNorm normalizes the same and its running statistics are the same; the sums differ in rounding."""
    options = ["train.max_steps=4", "checkpoint.every_steps=4"]
    losses = {}
    for name, stage, processes in (("alone", 0, 1), ("zero1", 1, 2), ("zero2", 2, 2), ("zero3", 3, 2)):
        rows = train(small_run, tmp_path / name, f"train.zero_stage={stage}", *options, processes=processes)
        losses[name] = torch.tensor([[row[2], row[3]] for row in rows], dtype=torch.float64)  # loss, gradient norm
    for name in ("zero1", "zero2", "zero3"):
        torch.testing.assert_close(losses[name], losses["alone"], rtol=2e-4, atol=0)
    weights = {name: read_weights(tmp_path / name).model for name in losses}
    for name in ("zero1", "zero2", "zero3"):
        for key, value in weights["alone"].items():
            torch.testing.assert_close(weights[name][key].float(), value.float(), rtol=1e-2, atol=1e-3, msg=f"{name} {key}")


def test_evaluation_is_exact_and_everything_is_logged(small_run: Path, tmp_path: Path) -> None:
    """Guards against images evaluated twice or never on two processes, and against a log that lacks what the README promises."""
    run = tmp_path / "run"
    options = [
        "train.epochs=0.2",
        "eval.every_epochs=0.1",
        "eval.batch_size=50",
        "checkpoint.every_steps=5",
        "checkpoint.keep_last=2",
        "log.every_steps=4",
    ]
    started = time.time()
    train(small_run, run, *options)

    rows = step_rows(run)
    assert [row["step"] for row in rows] == list(range(1, 19))  # ceil(0.2 * 1438 / 16)
    keys = {"step", "epoch", "samples", "loss", "lr", "grad_norm", "images_per_second", "mfu", "data_wait", "memory_gib"}
    assert all(keys <= row.keys() for row in rows)
    times = [json.loads(line)["time"] for line in (run / "metrics.jsonl").read_text().splitlines()]  # of every row
    assert started < times[0] and sorted(times) == times and times[-1] < time.time()
    assert all(row["mfu"] is None and 0 <= row["data_wait"] < 1 for row in rows)  # no data sheet has a CPU's peak
    assert [row["step"] for row in evaluation_rows(run)] == [9, 18]
    best = max(evaluation_rows(run), key=lambda row: row["top1"])["step"]  # the first of equals
    assert set(saved_steps(run)) == {15, 18, best}

    inside = evaluation_rows(run)[-1]
    assert inside["count"] == 359
    results = [
        evaluate(run, tmp_path / "result.json", "--batch-size", batch_size, processes=processes)
        for processes, batch_size in ((1, 359), (1, 50), (2, 50), (2, 7))
    ]
    for result in results:
        assert [result[k] for k in ("correct1", "correct5", "count")] == [inside[k] for k in ("correct1", "correct5", "count")]
        assert result["loss"] == pytest.approx(inside["loss"], rel=1e-5)

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"images": 0})
    events.Reload()
    shown = {
        "at_a_glance": {
            "1_top1",
            "2_loss",
            "3_images_per_second",
            "4_skipped_or_bad",
            "5_grad_norm",
            "6_data_wait",
        },
        "eval": {"top1", "top5", "loss"},  # TensorBoard opens the first two groups
        "train": {"loss", "lr", "grad_norm"},
        "trouble": {"replaced", "bad_samples", "skipped_steps"},
        "utilization": {"images_per_second", "data_wait", "data_wait_rank", "memory_gib", "peak_memory_gib"}
        | {f"slowest_{name}" for name in ("rank", "cost", "data", "compute", "waiting")},
    }
    assert set(events.Tags()["scalars"]) == {f"{group}/{name}" for group, names in shown.items() for name in names}
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 19))
    assert [event.step for event in events.Images("train/images")] == [1]
    assert [event.step for event in events.Images("eval/worst_and_best_classes")] == [9, 18]
    assert [event.step for event in events.Images("weights/peripheral_attention")] == [0, 9, 18]
    assert "config/text_summary" in events.Tags()["tensors"]

    environment = json.loads((run / "environment.json").read_text())
    assert environment[0]["world_size"] == 2 and environment[0]["packages"]["torch"].startswith("2.")


def test_a_finished_run_is_left_alone_and_another_config_is_refused(small_run: Path, tmp_path: Path) -> None:
    """Guards against starting over, and against two different runs in one folder."""
    run = tmp_path / "run"
    train(small_run, run, "train.max_steps=2", processes=1)

    def files() -> dict[Path, int]:
        return {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file() and p.name != ".lock"}

    before = files()
    assert (
        "nothing to train"
        in run_forked("pipeline.train", "--config", small_run, f"output_dir={run}", SMALL, "train.max_steps=2").stdout
    )
    assert before == files()
    other = run_forked("pipeline.train", "--config", small_run, f"output_dir={run}", SMALL, "optim.lr=1", check=False)
    assert other.returncode == 2 and "was started with optim.lr=0.0005, got 1.0" in other.stderr
    refused = run_forked(
        "pipeline.train", "--config", small_run, f"output_dir={tmp_path / 'new'}", "model.image_size=60", check=False
    )
    assert refused.returncode == 2 and not (tmp_path / "new" / "config.yaml").exists(), (
        "a refused start must not claim the folder"
    )


def test_a_loss_that_is_not_finite_stops_the_run(small_run: Path, tmp_path: Path) -> None:
    """Guards against a week of NaN, and against a checkpoint that is overwritten with it."""
    run = tmp_path / "run"
    options = [
        f"output_dir={run}",
        SMALL,
        "optim.lr=1000",  # for an image: 16,000 a step, and the decay of the weights multiplies them by the more
        "optim.lr_batch_size=1",
        "optim.weight_decay=1000",
        "optim.warmup_epochs=0",
        "train.max_steps=40",
        "checkpoint.every_steps=20",
    ]
    result = run_forked("pipeline.train", "--config", small_run, *options, check=False)
    assert result.returncode == 2
    assert (
        "at step 2 the gradient is not finite" in result.stderr
        and "lower optim.lr" in result.stderr
        and "Traceback" not in result.stderr
    )


def test_a_batch_larger_than_the_training_set_is_trained_on_and_warned_of(small_run: Path, tmp_path: Path) -> None:
    """Guards against a recipe for a million images that is run on a thousand: each step is more than an epoch, and nothing says so."""
    sizes = ["train.global_batch_size=1456", "train.micro_batch_size=208", "train.max_steps=1", "train.epochs=2"]
    result = run_forked("pipeline.train", "--config", small_run, SMALL, *sizes)
    said = result.stderr
    assert f"note: train.micro_batch_size is 208, 4 in {small_run}: pervit_t has BatchNorm" in result.stdout
    assert "warning: train.global_batch_size is 1,456, but the train split has only 1,438 images" in said
    assert "set it to 1,438 at most" in said
    assert step_rows(tmp_path / "run")[0]["epoch"] > 1


def test_learning_rate_and_schedule() -> None:
    """Guards against a schedule that steps per epoch, ends too early, or forgets to scale with the batch."""
    config = OptimConfig(lr=5e-4, lr_batch_size=512, warmup_lr=1e-6, warmup_epochs=5, min_lr=1e-5, warmup_prefix=True)
    rate = [learning_rate(step, 10.0, 20, 1024, config) for step in range(201)]
    assert rate[0] == 1e-6 and rate[50] == pytest.approx(1e-3) and rate[200] == pytest.approx(1e-5)
    assert all(a < b for a, b in zip(rate[:50], rate[1:51])) and all(a > b for a, b in zip(rate[50:200], rate[51:]))
    assert rate[125] == pytest.approx((1e-3 + 1e-5) / 2)

    schedule = Schedule(images=1438, global_batch_size=64, epochs=2, max_steps=None)
    assert schedule.last_step == 45  # 44.94 steps
    assert [s for s in range(1, 46) if schedule.passes(s, 1)] == [23, 45]
    assert all(Schedule(1000, 100, 1, None).passes(step, 0.1) for step in range(1, 11)), "0.3 // 0.1 is 2 in floating point"
    assert Schedule(1438, 64, 2, max_steps=7).last_step == 7
