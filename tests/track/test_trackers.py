"""``pipeline.track`` with the real clients, where they write to this machine: what they have is what ``metrics.jsonl`` has."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from pipeline.errors import UserError, install_extra
from pipeline.track.to_wandb import history
from pipeline.track.tracker import About, Picture, Point, Segment
from support.growing_run import GrowingRun, client_environment, rows_back
from support.launching import PATIENCE, REPOSITORY

Row = tuple[int, float, dict[str, Any]]


def environment(folder: Path) -> dict[str, str]:
    """Everything that the clients write lies in this folder; nothing is sent."""
    return client_environment(folder, WANDB_MODE="offline", MLFLOW_TRACKING_URI=f"sqlite:///{folder}/mlflow.db")


def track(folder: Path, tracker: str, *more: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "pipeline.track", str(folder / "run"), "--to", tracker, "--every", "0.1", *more]
    return subprocess.Popen(
        command, cwd=folder, env=environment(folder), stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def noted(folder: Path) -> dict[str, Any]:
    """The position file; empty before it is there."""
    files = list((folder / "state" / "pervit-track").glob("run-*.json"))
    return json.loads(files[0].read_text()) if files else {}


def wait_for(process: subprocess.Popen, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
        time.sleep(0.05)


def rows_noted(folder: Path, segment: int) -> int:
    state = noted(folder)
    return (
        sum(count for kind, count in state["sent"] if kind == "rows")
        if state.get("segment", {}).get("number") == segment
        else -1
    )


# ---- what each tracker has -----------------------------------------------------------------------------------------------------


def of_wandb(folder: Path, segment: dict[str, Any]) -> tuple[list[Row], int]:
    """The rows of all offline files of a run, in the order in which `wandb sync` sends them, and the pictures."""
    files = sorted((folder / "wandb").glob(f"offline-run-*-{segment['id']}/run-*.wandb"))
    rows = [row for path in files for row in history(path)]
    assert [row["_step"] for row in rows] == list(range(len(rows))), "a gap, or rows that arrive twice"
    pictures = {path.name for file in files for path in (file.parent / "files" / "media").rglob("*.png")}
    with_picture = [row for row in rows if any(name.endswith(".path") for name in row)]
    # A killed sender may have written a picture and not yet its row: it is sent again.
    sent = [Path(row[name]).name for row in with_picture for name in row if name.endswith(".path")]
    assert len(set(sent)) == len(sent) and set(sent) <= pictures
    return [(row["step"], row["_timestamp"], row) for row in rows if row not in with_picture], len(sent)


def of_mlflow(folder: Path, segment: dict[str, Any]) -> tuple[list[Row], int]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    for key in client.get_run(segment["place"]).data.metrics:
        for point in client.get_metric_history(segment["place"], key):
            values = rows.setdefault((point.step, point.timestamp), {})
            assert key not in values, "a point that is there twice"
            values[key] = point.value
    pictures = [each for each in client.list_artifacts(segment["place"], "images") if "compressed" not in each.path]
    return [(step, when / 1000, values) for (step, when), values in rows.items()], len(
        {each.path for each in pictures if each.path.endswith("png")}
    )


def of_trackio(folder: Path, segment: dict[str, Any]) -> tuple[list[Row], int]:
    with sqlite3.connect(folder / "trackio" / "pervit.db") as database:
        query = "SELECT step, metrics FROM metrics WHERE run_id = ? ORDER BY id"
        rows = [(step, json.loads(values)) for step, values in database.execute(query, (segment["place"],))]
    pictures = [values for _, values in rows if "train/images" in values]
    assert all((folder / "trackio" / "media" / each["train/images"]["file_path"]).is_file() for each in pictures)
    return [(step, values["where/unix_time"], values) for step, values in rows if values not in pictures], len(pictures)


READERS = {"wandb": of_wandb, "mlflow": of_mlflow, "trackio": of_trackio}


@pytest.fixture(params=READERS)
def tracker(request: pytest.FixtureRequest) -> Iterator[str]:
    pytest.importorskip(request.param, reason=install_extra(request.param))
    yield request.param


def test_what_arrives_is_what_the_run_has_written(tracker: str, tmp_path: Path) -> None:
    """Guards against rows that are missing or there twice: the sender starts before the run, sees it rewound, is killed with what its
    client has in memory, and goes on."""
    run = GrowingRun(tmp_path / "run")
    process = track(tmp_path, tracker)
    wait_for(process, lambda: (tmp_path / "state").is_dir())
    run.start()
    run.train(37)
    wait_for(process, lambda: rows_noted(tmp_path, segment=1) == 37 + 9)
    run.start(step=20)
    run.train(45)
    wait_for(process, lambda: rows_noted(tmp_path, segment=2) == 45 + 12)
    process.kill()
    process.wait()
    run.end()
    process = track(tmp_path, tracker)
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0 and "78 rows, " in said and "6 pictures, segment 2" in said, said
    rows, pictures = READERS[tracker](tmp_path, noted(tmp_path)["segment"])
    back = rows_back(rows)
    assert len(back) == 60 + 3 * 6 and back == run.rows
    assert pictures == 6


def test_a_signal_writes_what_the_client_holds(tmp_path: Path) -> None:
    """Guards against Weights & Biases' 32 KiB in memory, which a process that ends at once takes with it."""
    pytest.importorskip("wandb", reason=install_extra("wandb"))
    run = GrowingRun(tmp_path / "run")
    run.start()
    run.train(5)
    process = track(tmp_path, "wandb")
    wait_for(process, lambda: rows_noted(tmp_path, segment=1) == 5)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and "the same command continues" in said, said
    rows, _ = of_wandb(tmp_path, noted(tmp_path)["segment"])
    assert rows_back(rows) == run.rows


def test_a_picture_that_is_found_late_is_not_sent_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a second copy of what a killed sender had sent: its successor may know rows before it finds the picture."""
    mlflow = pytest.importorskip("mlflow", reason=install_extra("mlflow"))
    from pipeline.track.to_mlflow import MLflow

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mlflow, "get_tracking_uri", lambda: uri)
    monkeypatch.setattr(mlflow, "MlflowClient", partial(mlflow.MlflowClient, uri := f"sqlite:///{tmp_path}/mlflow.db"))
    png = BytesIO()
    Image.new("RGB", (8, 8)).save(png, "png")
    segment, about = Segment("0"), About("run", {}, {}, {})
    row, picture = Point(1, 1.0, {"loss": 2.0}), Picture("train/images", 1, 1.0, "1", png.getvalue())
    killed, successor = MLflow(None), MLflow(None)
    killed.open(segment, about, 0)
    killed.send(0, [row, picture])
    assert successor.open(segment, about, 1) == 1
    successor.send(1, [Point(2, 2.0, {"loss": 1.0})])
    successor.send(2, [picture])
    assert of_mlflow(tmp_path, {"place": segment.place})[1] == 1


def test_two_senders_of_one_run(tmp_path: Path) -> None:
    """Guards against two processes that send the same, and against files in the run folder, which is the training's."""
    pytest.importorskip("trackio", reason=install_extra("trackio"))
    run = GrowingRun(tmp_path / "run")
    first = track(tmp_path, "trackio")
    try:
        wait_for(first, lambda: (tmp_path / "state").is_dir() and bool(list((tmp_path / "state").rglob("*.lock"))))
        run.start()
        second = track(tmp_path, "trackio", "--once")
        _, said = second.communicate(timeout=PATIENCE)
        sentence = said.splitlines()[-1]
        assert second.returncode == 2 and sentence.startswith(f"error: {run.folder} is already being sent to "), said
    finally:
        first.send_signal(signal.SIGINT)
        first.communicate(timeout=PATIENCE)
    written = {"config.yaml", "environment.json", "events.jsonl", "metrics.jsonl", ".lock", "tensorboard"}
    assert set(os.listdir(run.folder)) == written


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "--to", "comet"], "error: --to must be one of wandb, mlflow, trackio, got 'comet': choose one."),
        (["nowhere", "--to", "wandb", "--once"], "error: nowhere does not exist: leave --once away"),
        (["file", "--to", "wandb"], "error: file must be a run folder, got a file: pass a run's output_dir."),
        (
            ["run", "--to", "wandb", "--every", "0"],
            "error: --every must be above 0 and at most 86400 seconds (a day), got 0: correct it.",
        ),
        (
            ["run", "--to", "wandb", "--every", "inf"],
            "error: --every must be above 0 and at most 86400 seconds (a day), got inf: correct it.",
        ),
        (
            ["run", "--to", "wandb", "--project", ""],
            "error: --project must be a name of printable characters, got '': give one,",
        ),
        (["run", "--to", "wandb"], "error: --to wandb requires Weights & Biases's client, which"),
    ],
    ids=["tracker", "no run", "file", "every", "for ever", "project", "client"],
)
def test_mistakes_are_one_sentence(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    """Guards against a traceback, and a command that waits for ever for what is not a run."""
    (tmp_path / "file").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "wandb.py").write_text("raise ImportError('of another Python')\n")  # instead of the client
    variables = {**environment(tmp_path), "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    command = [sys.executable, "-m", "pipeline.track", *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (2, "")
    (said,) = done.stderr.splitlines()
    assert said.startswith(sentence), said


def test_a_setting_that_the_client_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against the traceback of the library that checks the client's settings."""
    pytest.importorskip("wandb", reason=install_extra("wandb"))
    from pipeline.track.to_wandb import Wandb

    monkeypatch.setenv("WANDB_MODE", "nonsense")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    with pytest.raises(UserError, match="^Weights & Biases refuses a setting .*mode.*WANDB_MODE is online or offline") as error:
        Wandb(None)
    assert "\n" not in str(error.value)


def test_a_project_that_the_client_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against advice to log in."""
    pytest.importorskip("wandb", reason=install_extra("wandb"))
    from pipeline.track.to_wandb import Wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    with pytest.raises(UserError, match="refuses .*project name 'a/b'.*: choose another name with --project or WANDB_PROJECT"):
        Wandb("a/b").open(Segment("0"), About("run", {}, {}, {}), 0)


def test_nobody_is_logged_in(tmp_path: Path) -> None:
    """Guards against a question for a key that nobody answers, or a client's traceback."""
    pytest.importorskip("wandb", reason=install_extra("wandb"))
    GrowingRun(tmp_path / "run").start()
    variables = {key: value for key, value in environment(tmp_path).items() if key != "WANDB_API_KEY"}
    command = [sys.executable, "-m", "pipeline.track", "run", "--to", "wandb", "--once"]
    variables |= {"WANDB_MODE": "online", "WANDB_BASE_URL": "http://127.0.0.1:9", "NETRC": str(tmp_path / "netrc")}
    done = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=PATIENCE
    )
    said = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and "refuses (No API key configured" in said and "WANDB_MODE=offline" in said, done.stderr
