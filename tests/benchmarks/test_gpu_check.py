"""``make gpu-check``: its whole path in miniature on this CPU and on a pretended GPU, so that its first run on a GPU is not its first run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.gpu.__main__ import measured
from benchmarks.gpu.cases import AUTO, TITLES, Case, cases
from benchmarks.gpu.common import Context
from benchmarks.gpu.record import Record
from benchmarks.gpu.report import in_a_line, table, tables
from benchmarks.gpu.runner import run_case
from benchmarks.gpu.trace import figures
from benchmarks.gpu_table import LEDGER, page, records
from pipeline.errors import UserError
from pretended_gpu.build import missing
from support.launching import PATIENCE, REPOSITORY, clean_environment, run_module

STEP = {"model", "micro_batch", "compile", "zero_stage", "world_size", "source", "ms", "mfu", "images_per_second"}


def test_every_stage_in_miniature(tmp_path: Path) -> None:
    """Guards against a stage that no longer fits the code it measures, which would show on the GPU alone."""
    output, stages = tmp_path / "record.json", [name for name in TITLES if name not in ("kernel", "compile_test")]
    result = run_module("benchmarks.gpu", "--miniature", "--minutes", 500, "--output", output, check=False)
    record = json.loads(output.read_text())
    rows = record["rows"]
    failed = [row for row in rows if "failed" in row]
    assert (result.returncode, failed) == (0, []), result.stderr[-3000:]
    assert {row["stage"] for row in rows} == set(stages)
    for name in stages:
        assert f"**{TITLES[name]}**" in result.stdout
    for row in rows:  # each was printed when it was there, too
        assert in_a_line(row) in result.stdout
    assert (record["format"], record["gpu"]["count"]) == (1, 0)
    assert {"torch", "cuda", "dali", "pervit"} <= record["software"].keys() and record["commit"] and record["date"]
    together, from_loader = [row for row in rows if row["stage"] == "step"]
    assert STEP <= together.keys() and STEP <= from_loader.keys()
    assert (together["world_size"], together["zero_stage"], together["source"]) == (2, 1, "memory")
    assert (from_loader["world_size"], from_loader["source"]) == (1, "loader")
    assert from_loader["operators"] > 1000
    for row in rows:
        if row["stage"] == "pixels":
            assert row["largest"] == 0, "both are decoded on this CPU"
        if row["stage"] == "attention" and "skipped" not in row and "bound" not in row["form"]:
            assert max(row["error"], row["error_of_gradients"], row["error_of_dlog_phi"]) < 1e-5, row["form"]
    convolutions = [row for row in rows if row["stage"] == "convolution"]
    assert {"calls", "forward_ms", "ms"} <= convolutions[0].keys()
    assert sum(row["calls"] for row in convolutions if re.search(r"\d{3} groups", row["case"])) == 12, "one in each layer"


def test_every_stage_on_a_pretended_gpu(tmp_path: Path) -> None:
    """Guards against a path that only a GPU takes, such as its events, its profiler or DALI's absence, and that ends the check."""
    if reason := missing():
        pytest.skip(reason)
    output, stages = tmp_path / "record.json", [name for name in TITLES if name not in ("kernel", "test", "compile_test")]
    command = [sys.executable, "tests/pretended_gpu/run.py", "-m", "benchmarks.gpu", "--miniature", "--minutes", "500"]
    command += ["--only", ",".join(stages), "--output", str(output)]
    result = subprocess.run(command, cwd=REPOSITORY, env=clean_environment(), capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode in (0, 1), result.stderr[-3000:]
    record = json.loads(output.read_text())
    assert "H100" in record["gpu"]["name"] and (record["gpu"]["count"], record["gpu"]["capability"]) == (1, "9.0")
    assert {row["stage"] for row in record["rows"]} == set(stages)
    without_dali = [
        row
        for row in record["rows"]
        if (row["stage"], row.get("decode")) != ("loader", "gpu") and row["stage"] not in ("decode", "pixels")
    ]
    for row in without_dali:
        assert "failed" not in row, row
        if row["stage"] in ("step", "variant", "authors") and "skipped" not in row:
            assert row["ms"] > 0 and ("gpu_busy_ms" in row or "profiler" in row)
    assert [row["case"] for row in record["rows"] if row.get("skipped") == "needs two GPUs"] == [
        "pervit_t 8 off ZeRO 1, all GPUs",
        "all GPUs",
    ]


def test_without_a_gpu_it_says_so() -> None:
    """Guards against a table of CPU figures that is taken for a GPU's."""
    result = run_module("benchmarks.gpu", check=False)
    assert result.returncode == 2 and "finds no CUDA GPU: run this where there is one" in result.stderr
    result = run_module("benchmarks.gpu", "--only", "attention,steps", check=False)
    assert result.returncode == 2 and "--only must name some of machine, " in result.stderr


def test_the_order_of_cases() -> None:
    """Guards against a check that, stopped early, has measured what matters least, and against DALI before what does without it."""
    found = list(cases(miniature=False))
    names = [(case.stage, case.name) for case in found]
    assert len(set(names)) == len(names) and {case.stage for case in found} | {"kernel"} == set(TITLES)
    assert [case.stage for case in found[:3]] == ["machine", "data", "decode"]
    steps = [case for case in found if case.stage == "step"]
    first = [(case.options["model"], case.options["compile"]) for case in steps[:3]]
    assert first == [("pervit_m", AUTO), ("pervit_t", AUTO), ("pervit_s", AUTO)]
    assert found.index(steps[4]) < min(number for number, case in enumerate(found) if case.stage == "loader")
    alone = {
        (case.options["model"], case.options["compile"], case.options["micro_batch"]) for case in steps if not case.all_gpus
    }
    assert len(alone) == 3 * 4 * 2, "each model with each value of train.compile at 128 and 256"
    tests = [case.is_test for case in found]
    assert tests == sorted(tests), "tests are last"
    assert found[-1].stage == "compile_test" and found[-1].name == "tests/test_gpu_compile.py"


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    """In which the modules of cases are files of the test."""
    package = tmp_path / "benchmarks" / "gpu"
    package.mkdir(parents=True)
    for name in ("__init__", "common", "worker"):
        (package / f"{name}.py").write_text((REPOSITORY / "benchmarks" / "gpu" / f"{name}.py").read_text())
    child = "subprocess.Popen(['sleep', '600'], start_new_session=True, close_fds=False)"
    for name, then in {
        "crashes": "os.abort()",
        "hangs": f"yield {{'child': {child}.pid}}; time.sleep(600)",
        "raises": "raise RuntimeError('CUDA error: an\\nillegal access')",
        "exits": "os._exit(3)",
        "ends": "",
        "on_two": "os.abort() if os.environ['RANK'] == '1' else time.sleep(600)",
    }.items():
        (package / f"{name}.py").write_text(
            "import os, subprocess, sys, time\n"
            "def measure(context):\n"
            "    yield {}\n"
            "    print('its last words', flush=True)\n"
            f"    {then}\n"
        )
    monkeypatch.setattr("benchmarks.gpu.runner.REPOSITORY", tmp_path)
    return Context("", {}, tmp_path, True, 0, None)


def gone(pid: int) -> bool:
    """Whether a process ends."""
    deadline = time.perf_counter() + PATIENCE
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.perf_counter() > deadline:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.parametrize(
    ("module", "failed"),
    [
        ("crashes", "its process ended with SIGABRT"),
        ("exits", "its process ended with code 3"),
        ("raises", "RuntimeError: CUDA error: an illegal access"),
    ],
)
def test_a_case_that_fails_costs_its_own_rows(module: str, failed: str, context: Context) -> None:
    """Guards against an error on the GPU that ends the check, that takes rows of others, or that nobody is told of."""
    rows = list(measured([Case("step", name, name, 600, {"n": 1}) for name in (module, "ends")], context, 6000))
    before, failing, after = rows
    assert failing == {"stage": "step", "case": module, "n": 1, "world_size": 1, "failed": failed, "log": failing["log"]}
    assert "its last words" in failing["log"]
    assert (before["case"], after["case"], after.get("failed")) == (module, "ends", None)


def test_a_case_that_hangs_is_cut_with_its_children(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against one case that takes all the time, rows that are lost with it, and processes that stay on the GPU."""
    clock, passed = time.monotonic, [0.0]
    monkeypatch.setattr("benchmarks.gpu.runner.time.monotonic", lambda: clock() + passed[0])
    rows = []
    for row in run_case(Case("step", "a case", "hangs", 400), context, 1, 400):
        rows.append(row)
        passed[0] = 401.0 * ("child" in row)  # so that the test need not wait
    assert [row.get("failed") for row in rows] == [None, None, "cut at its limit of 400 s"]
    assert gone(rows[1]["child"])


def test_one_rank_that_crashes_ends_the_others(context: Context) -> None:
    """Guards against a check that waits for a rank which waits for another that is gone."""
    *_, failing = run_case(Case("step", "two", "on_two", 600), context, 2, 600)  # rank 0 may not have got to its row
    assert failing["failed"] == "rank 1 ended with SIGABRT"


def test_no_time_is_left(context: Context) -> None:
    """Guards against cases that disappear from the table when time is up, and tests that get none."""
    chosen = [Case("step", "a", "ends", 60), Case("test", "b", "suite", 60, {"file": "b"})]
    rows = list(measured(chosen, context, 0))
    assert [(row["case"], row["skipped"]) for row in rows] == [("a", "no time was left"), ("b", "no time was left")]
    assert rows[1]["file"] == "b"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_prints_what_there_is(number: signal.Signals, tmp_path: Path) -> None:
    """Guards against a machine's time that gave nothing because somebody needed the machine."""
    output = tmp_path / "record.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--miniature", "--only", "step", "--output", str(output)]
    process = subprocess.Popen(command, cwd=REPOSITORY, env=clean_environment(), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert "machine: machine" in process.stdout.readline()
        process.stdout.readline()
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        said = process.stdout.read()
        assert process.wait(PATIENCE) == 130
    finally:
        process.kill()
    assert "stopped by a signal" in said and "**Machine**" in said
    assert [row["stage"] for row in json.loads(output.read_text())["rows"]][:2] == ["machine", "machine"]
    assert all(gone(child.pid) for child in children)


def test_figures_of_a_trace() -> None:
    """Guards against overlapping kernels that count twice, and against waits of the profiler or of other threads in the step's."""

    def event(cat: str, name: str, ts: int, dur: int = 1, tid: int = 7, ph: str = "X") -> dict:
        return {"ph": ph, "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid}

    events = [
        event("user_annotation", "the measured steps", 1000, 70),
        event("gpu_user_annotation", "the measured steps", 1000, 99),
    ]
    assert "CUPTI" in figures(events, steps=2, thread=7)["profiler"]
    # busy 1000 to 1060 and 1080 to 1100
    events += [event("kernel", f"k{ts}", ts, dur) for ts, dur in ((1000, 40), (1010, 20), (1030, 30), (500, 400))]
    events += [event("kernel", "k1010", 1080, 20)]
    events += [event("cuda_runtime", name, 1001) for name in ("cudaLaunchKernel", "cudaLaunchKernelExC", "cudaMemcpyAsync")]
    events += [event("cuda_driver", "cuLaunchKernelEx", 1002), event("kernel", "a mark", 5000, ph="i")]
    events += [event("cuda_runtime", "cudaStreamSynchronize", 1003, tid=tid) for tid in (7, 8)]
    events += [event("cuda_runtime", "cudaDeviceSynchronize", ts) for ts in (900, 1071)]
    found = figures(events, steps=2, thread=7)
    kernels = found.pop("kernels")
    assert found == {
        "launches": 1.5,
        "kernels_and_copies": 2.0,
        "synchronisations": 1.0,
        "synchronisations_in_loop": 0.5,
        "gpu_busy_ms": 0.04,
    }
    assert [(each["kernel"], each["ms"], each["calls"]) for each in kernels] == [
        ("k1000", 0.02, 0.5),
        ("k1010", 0.02, 1.0),
        ("k1030", 0.015, 0.5),
    ]


def test_the_table_shows_reasons_and_escapes() -> None:
    """Guards against a row of reasons that breaks the table, or a figure that is shown as measured where it was not."""
    rows: list[dict[str, Any]] = [
        {"stage": "step", "case": "a", "ms": 1.2345, "n": 12345.6, "mfu": 0.1634},
        {"stage": "step", "case": "b", "failed": "x | y\nz", "log": "long"},
        {"stage": "step", "case": "c", "ms": None, "n": True},
    ]
    expected = [
        "|  | ms | n | mfu |",
        "|---|---|---|---|",
        "| a | 1.23 | 12,346 | 16.3% |",
        "| b | failed: x \\| y z |  |  |",
        "| c | - | yes |  |",
    ]
    assert table(rows).splitlines() == expected
    assert tables({"rows": rows}).startswith("**Training steps**\n\n|  | ms |")


def test_a_record_is_complete_after_each_row(tmp_path: Path) -> None:
    """Guards against a record that is cut where the check was, that is not JSON, or that tells whose machine it was."""
    path = tmp_path / "record.json"
    record = Record(path)
    record.add({"stage": "machine", "case": "machine", "gpu": {"name": "X", "count": 2}, "software": {"torch": "2"}})
    first = json.loads(path.read_text())
    assert (first["gpu"]["count"], first["software"], len(first["rows"])) == (2, {"torch": "2"}, 1)
    record.add(
        {"stage": "step", "case": "a", "ms": float("nan"), "mfu": float("inf"), "log": f"{Path.home()}/x {REPOSITORY}/y"}
    )
    row = json.loads(path.read_text(), parse_constant=pytest.fail)["rows"][1]
    assert (row["ms"], row["mfu"]) == (None, None)
    assert str(REPOSITORY) not in row["log"] and f"{Path.home()}/x" not in row["log"]


def test_the_page_has_the_ledgers_records(tmp_path: Path) -> None:
    """Guards against a record that was sent and is on no page, and a damaged one that is."""
    assert (REPOSITORY / "docs/results/gpu.md").read_text() == page(records(LEDGER)), (
        "python -m benchmarks.gpu_table > docs/results/gpu.md"
    )
    assert "No record has been sent yet." in page([])
    step = {"stage": "step", "model": "pervit_m", "compile": "off", "zero_stage": 0, "world_size": 1, "source": "memory"}
    rows = [
        {**step, "case": "a", "micro_batch": 256, "ms": 70.0, "mfu": 0.2, "launches": 900.0},
        {**step, "case": "b", "micro_batch": 128, "ms": 40.0, "mfu": 0.17},
        {**step, "case": "c", "micro_batch": 128, "failed": "OutOfMemoryError"},
        {**step, "case": "d", "micro_batch": 128, "ms": 50.0, "mfu": 0.1, "source": "loader"},
    ]
    record = {
        "format": 1,
        "gpu": {"name": "NVIDIA H100", "count": 1},
        "commit": "abc",
        "date": "2026-11-25T10:00:00",
        "rows": rows,
    }
    (tmp_path / "h100.json").write_text(json.dumps(record))
    assert [line for line in page(records(tmp_path)).splitlines() if "NVIDIA" in line] == [
        "| NVIDIA H100 | pervit_m | 128 | off | 0 | 1 | 40 | - | 17.0% | - | - | - | 2026-11-25, abc |",
        "| NVIDIA H100 | pervit_m | 256 | off | 0 | 1 | 70 | - | 20.0% | - | 900 | - | 2026-11-25, abc |",
    ]
    (tmp_path / "other.json").write_text(json.dumps({**record, "format": 2}))
    with pytest.raises(UserError, match="other.json must be a record of format 1"):
        records(tmp_path)


def test_make_gpu_check_takes_the_python_that_is_there(tmp_path: Path) -> None:
    """Guards against a target that installs, which needs a network, before it measures."""
    (tmp_path / "Makefile").write_text((REPOSITORY / "Makefile").read_text())
    (tmp_path / "constraints.txt").write_text("torch==2.13.0\n")

    def first_word() -> str:
        command = ["make", "-n", "gpu-check", "PYTHON=python3.12", "MINUTES=5"]
        outside = {key: value for key, value in clean_environment().items() if not key.startswith("MAKE")}  # of `make test`
        said = subprocess.run(command, cwd=tmp_path, env=outside, capture_output=True, text=True, check=True).stdout
        (line,) = said.splitlines()
        found = re.fullmatch(r"(\S+) -m benchmarks\.gpu --output gpu-check\.json --minutes 5 ?", line)
        assert found is not None, line
        return found[1]

    assert first_word() == "python3.12"
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    os.symlink(sys.executable, tmp_path / ".venv" / "bin" / "python")
    assert first_word() == ".venv/bin/python"
