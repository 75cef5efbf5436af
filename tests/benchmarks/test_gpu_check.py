"""``python -m benchmarks.gpu``: its whole path in miniature on this CPU, so that its first run on a GPU is not its first run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.gpu.report import table
from benchmarks.gpu.runner import run_stage
from benchmarks.gpu.stages import BY_NAME, Stage
from benchmarks.gpu.trace import figures, idle
from support.launching import PATIENCE, REPOSITORY, clean_environment, run_module


def test_every_stage_in_miniature(tmp_path: Path) -> None:
    """Guards against a stage that no longer fits the code it measures, which would show on the GPU alone."""
    lines = tmp_path / "rows.jsonl"
    stages = [name for name in BY_NAME if name not in ("steps_m", "steps_s")]  # steps_t with another model
    arguments = ("--miniature", "--only", ",".join(stages), "--output", lines, "--work", tmp_path / "work")
    result = run_module("benchmarks.gpu", *arguments, check=False)
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    logs = {path.name: path.read_text(errors="replace")[-1500:] for path in (tmp_path / "work").glob("*.log")}
    failed = [row for row in rows if "failed" in row["values"]]
    assert (result.returncode, failed) == (0, []), result.stderr[-3000:] + str([logs[row["stage"] + ".log"] for row in failed])
    assert list(dict.fromkeys(row["stage"] for row in rows)) == stages
    tables = result.stdout
    for stage in stages:
        assert f"**{BY_NAME[stage].title}**" in tables
    found = {(row["stage"], row["case"]): row["values"] for row in rows}
    ours, authors = found["steps_t", "ZeRO 0"], found["steps_t", "the authors' form"]
    assert ours["speed / authors'"] == pytest.approx(ours["images/s"] / authors["images/s"])
    assert ours["operators/step"] > 1000
    for place in ("evaluation", "crop and flip", "RandAugment"):
        assert found["pixels", place]["largest"] == 0, "both are decoded on this CPU"
    forms = {case: values for (stage, case), values in found.items() if stage == "attention"}
    for form in ("plain PyTorch", "PyTorch's choice of kernel", "authors", "operator"):
        (values,) = [values for case, values in forms.items() if case.endswith(form)]
        assert "skipped" in values or max(values["error"], values["error of dlog Φp"]) < 1e-5, form
    lost = found["faults", "rank 1 is killed (SIGKILL)"]
    assert lost["rank 0 ends with"] == 76 and lost["names rank 1"]


def test_without_a_gpu_it_says_so() -> None:
    """Guards against a table of CPU figures that is taken for a GPU's."""
    result = run_module("benchmarks.gpu", check=False)
    assert result.returncode == 2 and "finds none: run this where there is one" in result.stderr
    result = run_module("benchmarks.gpu", "--only", "attention,step", check=False)
    assert result.returncode == 2 and "--only must name some of machine, " in result.stderr


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """A stage whose process starts another one that outlives it, writes one row, and then sleeps or ends as its file says."""
    package = tmp_path / "benchmarks" / "gpu"
    package.mkdir(parents=True)
    for name in ("__init__", "common", "stages", "worker"):
        (package / f"{name}.py").write_text((REPOSITORY / "benchmarks" / "gpu" / f"{name}.py").read_text())
    (package / "machine.py").write_text(
        "import os, subprocess, time\n"
        "def measure(context):\n"
        "    child = subprocess.Popen(['sleep', '600'], start_new_session=True, close_fds=False)\n"
        "    yield 'child', {'pid': child.pid}\n"
        "    exec((context.work / 'then').read_text())\n"
    )
    monkeypatch.setattr("benchmarks.gpu.runner.REPOSITORY", tmp_path)
    return BY_NAME["machine"]


def test_a_stage_that_hangs_is_cut_with_its_children(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against one stage that takes all the time, rows that are lost with it, and processes that stay on the GPU."""
    (tmp_path / "then").write_text("time.sleep(600)")
    clock, passed = time.monotonic, [0.0]
    monkeypatch.setattr("benchmarks.gpu.runner.time.monotonic", lambda: clock() + passed[0])
    rows = []
    with pytest.raises(TimeoutError, match="cut at its limit of 400 s"):
        for line in run_stage(stage, tmp_path, True, 400):
            rows.append(json.loads(line))
            passed[0] = 401.0  # so that the test need not wait
    assert [row["case"] for row in rows] == ["child"]
    child = rows[0]["values"]["pid"]
    deadline = clock() + PATIENCE
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert clock() < deadline, "it lives on"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("then", "row", "error"),
    [
        ("os.abort()", None, "it ended with code -6"),
        ("raise RuntimeError('CUDA error: an\\nillegal access')", "RuntimeError: CUDA error: an illegal access", None),
    ],
)
def test_a_stage_that_fails(then: str, row: str | None, error: str | None, stage: Stage, tmp_path: Path) -> None:
    """Guards against an error on the GPU that ends the others, or that nobody is told of."""
    (tmp_path / "then").write_text(then)
    rows = []
    try:
        for line in run_stage(stage, tmp_path, True, 600):
            rows.append(json.loads(line))
        assert error is None
    except ChildProcessError as ended:
        assert error and error in str(ended)
    assert [each["values"].get("failed") for each in rows] == [None] + [row] * (row is not None)


def test_figures_of_a_trace() -> None:
    """Guards against overlapping kernels that count twice, and against waits of the profiler or of other threads in the step's."""

    def event(cat: str, name: str, ts: int, dur: int = 1, tid: int = 7, ph: str = "X") -> dict:
        return {"ph": ph, "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid}

    events = [
        event("user_annotation", "the measured steps", 1000, 70),
        event("gpu_user_annotation", "the measured steps", 1000, 99),
    ]
    # busy 1000 to 1060 and 1080 to 1100
    events += [event("kernel", "k", ts, dur) for ts, dur in ((1000, 40), (1010, 20), (1030, 30), (1080, 20), (500, 400))]
    events += [event("cuda_runtime", name, 1001) for name in ("cudaLaunchKernel", "cudaLaunchKernelExC", "cudaMemcpyAsync")]
    events += [event("cuda_driver", "cuLaunchKernelEx", 1002), event("kernel", "a mark", 5000, ph="i")]
    events += [event("cuda_runtime", "cudaStreamSynchronize", 1003, tid=tid) for tid in (7, 8)]
    events += [event("cuda_runtime", "cudaDeviceSynchronize", ts) for ts in (900, 1071)]
    found = figures(events, steps=2, thread=7)
    assert found == {
        "launches/step": 1.5,
        "kernels and copies/step": 2.0,
        "syncs/step": 1.0,
        "of these in the loop": 0.5,
        "GPU busy, ms": 0.04,
    }
    assert idle({**found, "ms/step": 0.05}) == {"GPU idle": "20.0%"}


def test_the_table_shows_reasons_and_escapes() -> None:
    """Guards against a row of reasons that breaks the table, or a figure that is shown as measured where it was not."""
    rows = [
        {"case": "a", "values": {"ms": 1.2345, "n": 12345.6}},
        {"case": "b", "values": {"failed": "x | y\nz"}},
        {"case": "c", "values": {"ms": None, "same": True}},
    ]
    assert table(rows).splitlines() == [
        "| | ms | n | same |",
        "|---|---|---|---|",
        "| a | 1.23 | 12,346 |  |",
        "| b | failed: x \\| y z |  |  |",
        "| c | - |  | yes |",
    ]


def test_make_gpu_check_takes_the_python_that_is_there(tmp_path: Path) -> None:
    """Guards against a target that installs, which needs a network, before it measures."""
    (tmp_path / "Makefile").write_text((REPOSITORY / "Makefile").read_text())
    (tmp_path / "constraints.txt").write_text("torch==2.13.0\n")

    def first_word() -> str:
        command = ["make", "-n", "gpu-check", "PYTHON=python3.12"]
        outside = {key: value for key, value in clean_environment().items() if not key.startswith("MAKE")}  # of `make test`
        said = subprocess.run(command, cwd=tmp_path, env=outside, capture_output=True, text=True, check=True).stdout
        (line,) = said.splitlines()
        return re.fullmatch(r"(\S+) -m benchmarks\.gpu --output gpu-check\.jsonl", line)[1]

    assert first_word() == "python3.12"
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    os.symlink(sys.executable, tmp_path / ".venv" / "bin" / "python")
    assert first_word() == ".venv/bin/python"
