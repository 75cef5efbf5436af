"""Steps that a check of a GPU has recorded, as the measure of a plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import load_config
from pipeline.errors import UserError
from pipeline.hardware import GPUS
from pipeline.planning import page
from pipeline.planning.measured import read_record
from pipeline.planning.memory import Subject
from pipeline.planning.rates import GpuRates
from pipeline.planning.time import Time, step_parts

GPU = GPUS["h100-80g"]
ROW = {
    "stage": "step",
    "source": "memory",
    "model": "deit_t",
    "micro_batch": 64,
    "compile": "blocks",
    "zero_stage": 0,
    "world_size": 1,
}


def subject(*overrides: str, model: str = "deit_t", gpu: str = "h100-80g") -> Subject:
    sizes = ("train.micro_batch_size=128", "train.global_batch_size=1024")
    return Subject(load_config(model, [*sizes, *overrides]), 1, 8, GPUS[gpu])


def write(path: Path, *rows: dict[str, Any], **others: Any) -> Path:
    gpu = {"name": "NVIDIA H100 80GB HBM3", "count": 1, "capability": "9.0", "driver": "580", "memory_gib": 79.1}
    path.write_text(
        json.dumps({"format": 1, "gpu": gpu, "software": {}, "commit": "", "date": "", "rows": list(rows), **others})
    )
    return path


def test_the_most_similar_step_scales_the_plan(tmp_path: Path) -> None:
    """Guards against the figure of another model or of another form of its step, and against one that counts as it is."""
    rows = [
        {"stage": "attention", "case": "64", "ms": 1.0},
        {**ROW, "source": "loader", "ms": 2.0},
        {**ROW, "model": "a_config_of_another_version", "ms": 3.0},
        {**ROW, "failed": "out of memory"},
        {**ROW, "model": "deit_s", "micro_batch": 128, "ms": 40.0},
        {**ROW, "compile": "off", "micro_batch": 128, "ms": 50.0},
        {**ROW, "ms": 60.0},
        {**ROW, "micro_batch": 256, "ms": 70.0},
    ]
    path = write(tmp_path / "record.json", *rows)
    found = {
        wanted.config.train.compile + wanted.config.model.name: read_record(path, wanted).step_seconds
        for wanted in (subject(), subject("train.compile=off"), subject(model="deit_b"), subject("train.compile=graphs"))
    }
    assert found == {"autodeit_t": 0.06, "offdeit_t": 0.05, "autodeit_b": 0.04, "graphsdeit_t": 0.05}
    plan = subject()
    time = Time(plan, GpuRates(GPU), None, measured=read_record(path, plan))
    recorded = Subject(
        load_config("deit_t", ["train.micro_batch_size=64", "train.global_batch_size=64", "train.compile=blocks"]), 1, 1, GPU
    )
    there = sum(step_parts(recorded, GpuRates(GPU)).parts.values())
    here = sum(step_parts(plan, GpuRates(GPU)).parts.values())
    assert time.step_seconds == pytest.approx(here * 0.06 / there)
    (line,) = (value for name, value in page.time_sections(time)["Time of an optimizer step"] if name == "measured")
    assert line.startswith(
        f"{path}, deit_t, micro-batch 64, train.compile=blocks on 1 process: 60 ms a step, {time.ratio:.2f} times"
    )


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"format": 2}, "whose format is 2, not 1"),
        ({"rows": [{"case": "x"}]}, r"\(KeyError: 'stage'\)"),
        ({"rows": 3}, r"\(TypeError"),
        ({"gpu": None}, r"\(TypeError"),
        ({"rows": []}, "which has no steps with batches in memory: run make gpu-check to its end"),
    ],
)
def test_what_is_no_record_is_refused(content: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    """Guards against tracebacks."""
    with pytest.raises(UserError, match=f"--gpu-record must be a record of make gpu-check, got .*{sentence}"):
        read_record(write(tmp_path / "record.json", **content), subject())


def test_a_record_of_another_gpu_or_precision_is_refused(tmp_path: Path) -> None:
    """Guards against the pace of something else."""
    path = write(tmp_path / "record.json", {**ROW, "ms": 60.0})
    must = "--gpu-record must be of the planned kind of GPU, got .*: "
    with pytest.raises(UserError, match=f"{must}it ran on NVIDIA H100 80GB HBM3, and the plan is for a100-80g"):
        read_record(path, subject(gpu="a100-80g"))
    with pytest.raises(UserError, match=f"{must}its steps are in bf16, not fp32"):
        read_record(path, subject("train.precision=fp32"))
