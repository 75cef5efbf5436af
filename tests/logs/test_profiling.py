"""``log.profile_steps``: the files that it writes, and that nothing else changes."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path

import pytest
import torch

from pipeline.checkpoint.weights import read_weights
from pipeline.cluster.world import World
from pipeline.logs.profiling import StepProfiler, memory_curve
from support.ranks import run_forked
from support.runs import step_rows
from support.small_run import SMALL_MODEL

WORLD = World(0, 1, torch.device("cpu"), 1)


def train(config: Path, run: Path, *overrides: object) -> tuple[list, str]:
    """Train on two processes; the rows without what depends on the clock, and what was said."""
    result = run_forked("pipeline.train", "--config", config, f"output_dir={run}", *SMALL_MODEL, *overrides, processes=2)
    return [(row["step"], row["loss"], row["grad_norm"]) for row in step_rows(run)], result.stdout + result.stderr


def events(file: Path) -> list[dict]:
    return json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]


def profiled_steps(file: Path) -> set[int]:
    names = {event.get("name", "") for event in events(file)}
    return {int(name.partition("#")[2]) for name in names if name.startswith("ProfilerStep#")}


@pytest.mark.long
@pytest.mark.multiprocess
def test_the_result_is_the_same_and_each_rank_has_its_files(small_run: Path, tmp_path: Path) -> None:
    """Guards against a profiler that changes what it watches, and a resume that loses the rest of the window: the steps 2 to 3 are
    taken by two starts."""
    plain, watched, window = tmp_path / "plain", tmp_path / "watched", "log.profile_steps=[2, 3]"
    expected, _ = train(small_run, plain, "train.max_steps=3")
    _, said = train(small_run, watched, "train.max_steps=2", window)
    assert "log.profile_steps is [2, 3], of which this start takes the steps 2 to 2: these will be profiled" in said
    found, said = train(small_run, watched, "train.max_steps=3", window)
    assert "of which this start takes the steps 3 to 3" in said

    assert found == expected
    for kind in ("model", "ema"):
        weights, others = (read_weights(run).choose(kind) for run in (plain, watched))
        assert weights.keys() == others.keys()
        assert all(torch.equal(value, others[name]) for name, value in weights.items())

    for folder, steps in (("steps-2-2", {2}), ("steps-3-3", {3})):
        files = sorted(path.name for path in (watched / "profile" / folder).iterdir())
        kinds = ("memory.json.gz", "pt.trace.json.gz")
        assert files == [f"rank-{rank:05d}.{kind}" for rank in range(2) for kind in kinds]
        for rank in range(2):
            stem = watched / "profile" / folder / f"rank-{rank:05d}"
            assert profiled_steps(stem.with_name(f"{stem.name}.pt.trace.json.gz")) == steps
            curve = events(stem.with_name(f"{stem.name}.memory.json.gz"))
            assert {event["ph"] for event in curve} == {"C"} and max(event["args"]["MiB"] for event in curve) > 1
    assert not (plain / "profile").exists()


@pytest.mark.parametrize(
    ("window", "done", "sentence"),
    [
        (None, 0, None),
        ([5, 10], 0, None),
        ([5, 12], 0, "log.profile_steps is [5, 12], of which this start takes the steps 5 to 10: these will be profiled"),
        ([5, 10], 6, "log.profile_steps is [5, 10], of which this start takes the steps 7 to 10: these will be profiled"),
        ([5, 9], 9, "log.profile_steps is [5, 9], but this start resumes from step 9: nothing will be profiled"),
        ([11, 12], 0, "log.profile_steps is [11, 12], but the last step of this run is 10: nothing will be profiled"),
    ],
)
def test_steps_that_will_not_come_are_named(window: list[int] | None, done: int, sentence: str | None) -> None:
    """Guards against waiting for a profile that never comes."""
    assert StepProfiler(Path(), window, WORLD, done, last_step=10).remark() == sentence


def test_a_profile_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a run that ends for its diagnosis; and a run that fails within the window leaves no half profile."""
    (tmp_path / "profile").write_text("a file where the folder should be")
    profiler = StepProfiler(tmp_path, (1, 2), WORLD, 0, last_step=10)
    with profiler.step(1):
        torch.ones(3) + 1
    assert not profiler.ends_with(1) and profiler.ends_with(2)
    logging.getLogger("pipeline").propagate = True
    with caplog.at_level(logging.WARNING):
        profiler.close()
    assert "cannot be written (Not a directory): the run continues without it" in caplog.text
    with pytest.raises(ZeroDivisionError), profiler.step(2):
        raise ZeroDivisionError
    profiler.abandon()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["profile"]


def test_a_memory_curve() -> None:
    """Guards against curves of several devices in one."""

    def memory(ts: float, kind: int, total: int) -> dict:
        return {
            "ph": "i",
            "name": "[memory]",
            "ts": ts,
            "args": {"Device Type": kind, "Device Id": 0, "Total Allocated": total},
        }

    curve = memory_curve([memory(2, 1, 2**21), {"name": "aten::add", "ts": 0}, memory(1, 0, 2**20)])
    assert [(each["name"], each["ts"], each["args"]["MiB"]) for each in curve] == [
        ("memory of CPU", 1, 1),
        ("memory of GPU 0", 2, 2),
    ]
