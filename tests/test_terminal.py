"""What a command writes fits its terminal and keeps nobody waiting; a file gets plain, whole lines."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from pipeline.errors import counted
from support.launching import PATIENCE, REPOSITORY, clean_environment, run_script

ESCAPE = "\x1b["


def on_terminal(code: str, columns: int = 60, **variables: str) -> str:
    """All that a program shows on a terminal."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = clean_environment(PYTHONPATH=str(REPOSITORY), **{"TERM": "xterm", **variables})
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # EIO: the program has ended
            break
        if not part:
            break
        shown += part
    os.close(ours)
    assert process.wait(timeout=PATIENCE) == 0, shown
    return shown.decode().replace("\r\n", "\n")


SAY = """
import logging, sys
from pipeline.logs import console
from pipeline.terminal import fitted
console.say("step 10 of " + "a run with many words " * 6)
logging.getLogger("pipeline").warning("something " * 12)
print(fitted("weights    ema, " + "of a run " * 10 + "\\n  short", sys.stdout))
"""


def test_lines_are_wrapped_at_words_for_a_terminal_alone() -> None:
    """Guards against 170 columns in a terminal of 110, and against lines that a program reads from a log being taken apart."""
    shown = on_terminal(SAY)
    lines = shown.splitlines()
    assert all(len(re.sub(r"\x1b\[\d+m", "", line)) <= 60 for line in lines), shown
    assert re.match(r"\d\d:\d\d:\d\d step 10 of a run", lines[0]) and re.match(" {9}\\S", lines[1])
    table = next(number for number, line in enumerate(lines) if line.startswith("weights    ema"))
    assert re.match(" {11}\\S", lines[table + 1])
    assert lines[-1] == "  short"
    piped = run_script("-c", SAY)
    assert len(piped.stdout.splitlines()) == 3 and len(piped.stderr.splitlines()) == 1
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d step 10", piped.stdout) and ESCAPE not in piped.stdout + piped.stderr


def test_colours_are_for_terminals_that_want_them() -> None:
    """Guards against escape codes in files, and in terminals of people who said that they want none."""
    assert f"{ESCAPE}33mwarning:{ESCAPE}0m something" in on_terminal(SAY)
    for refusal in ({"NO_COLOR": "1"}, {"TERM": "dumb"}, {"NO_COLOR": "1", "FORCE_COLOR": "1"}):
        shown = on_terminal(SAY, **refusal)
        assert ESCAPE + "3" not in shown and "warning: something" in shown


WAIT = """
import os, time
from pipeline import terminal
terminal.SILENCE = 0.2
os.environ["PERVIT_QUIET"] = "QUIET"
with terminal.Stage("thinking"):
    time.sleep(SECONDS)
for batch in terminal.Progress(3, "looking", "batches"):
    time.sleep(0.5)
with terminal.Stage("nobody sees this", shown=False):
    time.sleep(0.5)
"""


def test_what_takes_long_says_so() -> None:
    """Guards against a minute in which nothing shows whether a command works or hangs."""
    loud = WAIT.replace('QUIET"\n', '"\n')
    piped = run_script("-c", loud.replace("SECONDS", "1"))
    assert piped.stdout == "" and "nobody" not in piped.stderr
    assert re.search(r"^\d{4}\S+ \S+ thinking: \d s$", piped.stderr, re.MULTILINE)
    assert re.search(r"looking: 1 of 3 batches, [12] s left$", piped.stderr, re.MULTILINE)
    assert run_script("-c", WAIT.replace("SECONDS", "1")).stderr == ""
    shown = on_terminal(WAIT.replace("SECONDS", "2.5"))
    assert re.search(r"thinking: 00:0[12]", shown) and re.search(r"looking: .*\b[123]/3 ", shown) and "nobody" not in shown
    assert "thinking: 2 s" not in shown, "a line for files"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_dry_run_ends_at_a_signal(number: signal.Signals, tmp_path: Path, small_run: Path) -> None:
    """Guards against a dry run that goes on for minutes after it was told to end, and against a traceback."""
    command = [sys.executable, "-m", "pipeline.train", "--config", small_run, "--dry-run", f"output_dir={tmp_path / 'run'}"]
    process = subprocess.Popen(
        list(map(str, command)),
        cwd=REPOSITORY,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout and process.stdout.readline().endswith("loading PyTorch, DeepSpeed and DALI\n")
    time.sleep(0.5)  # it is importing
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE)
    assert "nothing wrong" not in out and "Traceback" not in err
    assert process.returncode == (-signal.SIGTERM if number == signal.SIGTERM else 130), err


def test_plurals() -> None:
    """Guards against "1 images" and "2 batchs"."""
    words = ("image", "class", "process", "batch", "evaluation")
    assert [counted(1, word) for word in words] == ["1 image", "1 class", "1 process", "1 batch", "1 evaluation"]
    assert [counted(2, word) for word in words] == ["2 images", "2 classes", "2 processes", "2 batches", "2 evaluations"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("train", "--config", "configs/demo.yaml", "data.path={}/none"), "shard folder {}/none does not exist: set data.path to"),
        (("train", "--config", "configs/demo.yaml", "data.path={}/photos"), "{}/photos is a folder of images, not a shard set"),
        (
            ("train", "--config", "configs/demo.yaml", "data.path={}/shards", "train.init_from={}/none.pth"),
            "train.init_from {}/none.pth does not exist",
        ),
        (
            ("train", "--config", "configs/demo.yaml", "data.path={}/shards", "train.teacher={}/none"),
            "train.teacher {}/none does not exist",
        ),
        (("evaluate", "--checkpoint", "{}/none.pt", "--data", "{}/shards"), "{}/none.pt does not exist"),
        (("evaluate", "--checkpoint", "{}/weights.pth", "--data", "{}/none"), "--data must be a folder, got {}/none, which does not exist"),
        (("predict", "{}/none", "{}/photos"), "{}/none does not exist"),
        (("predict", "{}/weights.pth", "{}/none.jpg", "{}/no.jpg"), "no image is there: {}/none.jpg, {}/no.jpg do not exist"),
        (("export", "{}/none", "--format", "safetensors", "--output", "{}/x.safetensors"), "{}/none does not exist"),
        (("analyze", "{}/none", "--output", "{}/analysis"), "{}/none does not exist"),
        (("plan", "--config", "configs/demo.yaml", "--data", "{}/photos"), "{}/photos is a folder of images"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)  # fmt: skip
def test_a_missing_path_is_said_before_pytorch_is_loaded(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    """Guards against half a minute of loading before a typing error is named."""
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    (tmp_path / "photos" / "cat" / "a.jpg").touch()
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "manifest.json").touch()
    (tmp_path / "weights.pth").touch()
    block = "import sys; sys.modules['torch'] = None; from pipeline.command_line import run_command\n"
    block += f"from pipeline.{arguments[0]} import main; run_command(main)"
    result = run_script("-c", block, *(word.replace("{}", str(tmp_path)) for word in arguments[1:]), check=False)
    assert result.returncode == 2 and f"error: {said.replace('{}', str(tmp_path))}" in result.stderr, result.stderr
