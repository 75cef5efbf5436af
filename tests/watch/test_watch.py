"""``pipeline.watch``: a run's files, as they grow and are rewritten, as a page of a terminal."""

from __future__ import annotations

import fcntl
import io
import json
import os
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from pipeline.logs.run_log import drop_rows_after
from pipeline.runs.rows import Tail
from pipeline.runs.state import state_of
from pipeline.watch import screen
from pipeline.watch.screen import Curve, LiveRun
from support.checkpoints import save_state
from support.launching import PATIENCE, REPOSITORY, clean_environment, run_module
from support.ranks import train

NOW = 1_800_000_000.0
LOCK = {"pid": 4711, "host": "node7", "slurm_job": "17_2", "since": "2027-01-15 08:00:00"}


def step_row(step: int, **more: object) -> str:
    row = {"step": step, "time": NOW - 600 + step, "epoch": step / 50, "samples": step, "loss": 3 - step / 100, "lr": 1e-4}
    row |= {"grad_norm": 0.5, "images_per_second": 1234.5, "mfu": 0.41, "data_wait": 0.02, "memory_gib": 7.25}
    return json.dumps({**row, "peak_memory_gib": 8.5, "bad_samples": 0, "skipped_steps": 0, **more}) + "\n"


def evaluation_row(step: int, weights: str, top1: float) -> str:
    return (
        json.dumps({"step": step, "time": NOW - 600 + step, "weights": weights, "top1": top1, "top5": 99.0, "loss": 1.0}) + "\n"
    )


def write_run(folder: Path, steps: int = 100, lock: object = LOCK) -> Path:
    """A run of 200 steps, two evaluations of two kinds of weights, two restarts."""
    folder.mkdir()
    for step in range(100, steps + 1, 100):
        save_state(folder, step, 200)
    config = {
        "model": {"name": "pervit_t", "image_size": 224},
        "train": {"epochs": 4.0, "max_steps": None},
        "log": {"every_steps": 10},
    }
    (folder / "config.yaml").write_text("# precision bf16\n" + yaml.safe_dump(config))
    start = {"started": "2027-01-15T08:00:00+0000", "world_size": 16, "hosts": ["node7", "node8"], "device": "H100"}
    (folder / "environment.json").write_text(json.dumps([{**start, "first_step": first} for first in (1, 21, 41)]))
    rows = [step_row(step, bad_samples=2) for step in range(1, steps + 1)]
    rows += [evaluation_row(step, *each) for step in (50, 100) for each in (("model", step / 2 + 10), ("ema", 70 - step / 20))]
    (folder / "metrics.jsonl").write_text("".join(rows))
    write_events(folder, {"event": "start", "last_step": 200})
    (folder / ".lock").write_text(json.dumps(lock) if lock else "")
    for path in (folder / "checkpoints", folder / "environment.json"):
        os.utime(path, (NOW - 900, NOW - 900))
    return folder


def write_events(folder: Path, *events: dict) -> None:
    (folder / "events.jsonl").write_text(
        "".join(json.dumps({"step": 0, "time": NOW - 900, **event}) + "\n" for event in events)
    )


def looked_at(path: Path) -> LiveRun:
    run = LiveRun(path)
    run.look()
    return run


def shown(*runs: LiveRun, width: int = 100, now: float = NOW, encoding: str = "utf-8") -> str:
    """The page, or the table, as text; no line may be wider than the terminal."""
    output = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=output, width=width)
    console.print(screen.page(runs[0], console, now) if len(runs) == 1 else screen.table(runs, now))
    output.flush()
    text = output.buffer.getvalue().decode(encoding)
    assert max(map(len, text.splitlines())) <= width
    return text


@pytest.mark.parametrize("width", [60, 120])
def test_the_page_answers_at_any_width(width: int, tmp_path: Path) -> None:
    """Guards against figures that are cut off on a narrow terminal, and against a page without colours that says less."""
    run = looked_at(write_run(tmp_path / "run"))
    text = shown(run, width=width, now=NOW - 490)
    flat = " ".join(text.replace("│", " ").split())
    for part in (
        *("50%, step 100 of 200, epoch 2.00, 2 min left", "run (pervit_t, 224 px)", "2.0000", "60.00 %", "65.00 %"),
        *("67.50 % at step 50 (ema); last evaluation at step 100", "1,234.5 images/s, MFU 41.0%, data wait 2.0%"),
        *("7.25 GiB, peak 8.50 GiB", "2 bad samples, 0 skipped steps, 2 restarts", "running, last activity 10 s ago"),
        *("process 4711 on node7 (Slurm job 17_2,", "16 processes on 2 hosts", "1 checkpoint, the newest of step 100"),
    ):
        assert part in flat, f"{part}\n{text}"
    assert "█" in text and "▁" in text and "…" not in text and "\x1b" not in text
    plain = shown(run, width=width, encoding="ascii")
    assert "[####################...................." in plain and "#**" in plain


def test_what_a_run_does_is_said(tmp_path: Path) -> None:
    """Guards against a run that was killed and looks alive, and one that has ended and looks stuck."""
    run = looked_at(write_run(tmp_path / "run"))
    assert state_of(run, NOW - 500 + 100).name == "running"
    assert "killed at step 100 of 200, 1 h 11 min ago" in shown(run, now=NOW - 500 + 4260)
    stopped = looked_at(write_run(tmp_path / "stopped", lock=None))
    write_events(stopped.path, {"event": "start", "last_step": 150}, {"event": "end", "reason": "stopped by SIGTERM"})
    stopped.look()
    assert "stopped at step 100 of 150" in shown(stopped) and "stopped by SIGTERM" in shown(stopped)
    assert "finished at step 200" in shown(looked_at(write_run(tmp_path / "done", steps=200, lock=None)))
    assert "not there yet" in shown(looked_at(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    assert "waits for a run in" in shown(looked_at(tmp_path / "empty"))
    table = shown(*(looked_at(tmp_path / name) for name in ("run", "done", "nowhere")), width=80, now=NOW - 490)
    for part in ("50%", "67.5", "2 min left", "100%", "finished", "nowhere", "not begun"):
        assert part in table, table


def test_damaged_files_cost_only_themselves(tmp_path: Path) -> None:
    """Guards against a page that ends at half a row, another's file, or a file that is being written."""
    folder = write_run(tmp_path / "run")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(
            '{"step": \n[1]\n"a"\n\xff\n{"top1": null, "weights": "model"}\n' + step_row(101, loss=None) + step_row(102)[:20]
        )
    (folder / "environment.json").write_text("[{")
    (folder / "config.yaml").write_text("a: [")
    run = looked_at(folder)
    assert run.row["step"] == 101
    text = shown(run)
    assert "environment.json is damaged" in text and "config.yaml is damaged" in text and "step 101" in text
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(step_row(102)[20:])
    (folder / "environment.json").write_text("[]")
    run.look()
    assert run.row["step"] == 102 and "environment.json" not in shown(run)


def test_only_what_is_new_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a login node that reads 100 MB each second, and against steps that a resume has dropped and a page keeps."""
    path = tmp_path / "metrics.jsonl"
    tail, count = Tail(path), 0
    assert not tail.was_replaced() and list(tail.lines()) == []
    path.write_text("".join(step_row(step) for step in range(1, 5001)))
    assert not tail.was_replaced() and len(list(tail.lines())) == 5000
    with open(path, "a") as file:
        file.write(step_row(5001) + '{"step"')

    class Counting(io.FileIO):
        def read(self, size: int = -1) -> bytes:
            nonlocal count
            block = super().read(size)
            count += len(block)
            return block

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", lambda path, mode: Counting(path))
        assert not tail.was_replaced() and [json.loads(line)["step"] for line in tail.lines()] == [5001]
        assert count < 1000
        assert not tail.was_replaced() and list(tail.lines()) == []
    drop_rows_after(path, 4000)  # as a resume does
    assert tail.was_replaced()
    tail.rewind()
    assert len(list(tail.lines())) == 4000 and not tail.was_replaced()
    path.write_text(step_row(1))
    assert tail.was_replaced()
    path.unlink()
    assert not tail.was_replaced() and list(tail.lines()) == []

    run = looked_at(write_run(tmp_path / "run"))
    drop_rows_after(run.path / "metrics.jsonl", 50)
    run.look()
    assert run.row["step"] == 50 and run.evaluations["ema"]["step"] == 50 and len(run.loss.values) == 50


def test_a_long_curve_keeps_its_shape_in_little_memory() -> None:
    """Guards against a million points in memory, and a line of bars that shows the last ones only."""
    curve = Curve()
    for step in range(100_000):
        curve.add(step)
    curve.add(None), curve.add(float("nan"))
    assert len(curve.values) < 2048 and curve.values[0] < 200 and curve.values[-1] > 99_000
    assert screen.sparkline(curve.values, 8) == "▁▂▃▄▅▆▇█"
    assert screen.sparkline([1.0, 1.0], 8) == "▄▄" and screen.sparkline([2.0, 1.0], 8, unicode=False) == "#_"


@pytest.mark.multiprocess
def test_a_run_in_progress_is_watched(small_run: Path, tmp_path: Path) -> None:
    """Guards against names and forms of files that only this test's own files have, and against PyTorch on a login node."""
    run = LiveRun(tmp_path / "run")
    job = train(2, small_run, run.path, "train.max_steps=300", "checkpoint.every_steps=5", "eval.every_epochs=0.1")

    def is_under_way() -> bool:
        run.look()
        return state_of(run).step >= 10 and bool(run.checkpoints and run.evaluations)

    try:
        assert job.until(is_under_way), job.outputs()
        done = run_module("pipeline.watch", run.path, "--once", COLUMNS="100")
        for part in (" of 300,", "running, last activity", "top-1 ema", "2 processes", "images/s", "checkpoint"):
            assert part in done.stdout, done.stdout
        code = f"import sys; sys.argv[1:] = [{str(run.path)!r}, '--once']; from pipeline.watch.__main__ import main; main()"
        code += "; print(sorted({'torch', 'tensorboard', 'numpy', 'deepspeed'} & sys.modules.keys()))"
        alone = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
        assert "'torch'" not in alone.stdout and "'deepspeed'" not in alone.stdout and "]" in alone.stdout, alone
    finally:
        job.signal(signal.SIGTERM)
        job.wait()
    run.look()
    assert state_of(run).name == "stopped" and "stopped at step" in shown(run, now=time.time())


def test_without_a_terminal_there_must_be_a_run(tmp_path: Path) -> None:
    """Guards against an exit code of 0 in a script that misspells a run; of several runs one may not have begun."""
    run_folder = write_run(tmp_path / "run")
    for once in ([], ["--once"]):
        result = run_module("pipeline.watch", tmp_path / "rum", *once, check=False)
        assert result.returncode == 2 and not result.stdout
        assert f"error: {tmp_path / 'rum'} does not exist: correct the name" in result.stderr
    assert "rum" in run_module("pipeline.watch", run_folder, tmp_path / "rum", "--once").stdout


@pytest.mark.parametrize("end", [b"q", b"\x03"], ids=["q", "Ctrl-C"])
def test_a_key_ends_the_page(end: bytes, tmp_path: Path) -> None:
    """Guards against a terminal that is left without echo or on another page, and against an exit code that looks like a failure."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    before = termios.tcgetattr(theirs)
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeline.watch", write_run(tmp_path / "run")],
        cwd=REPOSITORY,
        env=clean_environment(TERM="xterm", PYTHONPATH=str(REPOSITORY)),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C becomes a signal
    )
    text = b""
    while b"GiB" not in text:
        text += os.read(ours, 4096)
    os.write(ours, end)
    while b"\x1b[?1049l" not in text:  # back from the alternate page
        text += os.read(ours, 4096)
    fcntl.fcntl(ours, fcntl.F_SETFL, os.O_NONBLOCK)
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        try:
            text += os.read(ours, 4096)
        except BlockingIOError:
            time.sleep(0.02)
    assert process.returncode == 0, text.decode(errors="replace")
    assert termios.tcgetattr(theirs)[3] == before[3] and b"Traceback" not in text
    os.close(ours), os.close(theirs)


def test_a_mistake_is_one_sentence(tmp_path: Path) -> None:
    """Guards against a page that waits for ever for what is not a run."""
    (tmp_path / "file").touch()
    done = run_module("pipeline.watch", tmp_path / "file", check=False)
    assert (
        done.returncode == 2
        and done.stderr == f"error: {tmp_path / 'file'} must be a run folder, got a file: pass a run's output_dir.\n"
    )
