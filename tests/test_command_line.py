"""`pervit`, and what a command says when it is stopped."""

from __future__ import annotations

import importlib
import re
import sys

import pytest

from pipeline.__main__ import command, overview
from pipeline.command_line import COMMANDS, run_command
from pipeline.config.loading import override_parser
from pipeline.errors import UserError
from support.launching import run_module


def _stop(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("module", ["analyze", "evaluate", "predict", "report"])
def test_ctrl_c_promises_no_resumption_that_there_is_not(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against a user who believes that half of an evaluation is saved."""
    command = importlib.import_module(f"pipeline.{module}")
    monkeypatch.setattr(command, "command_parser", _stop)
    with pytest.raises(SystemExit) as ended:
        run_command(command.main)
    assert ended.value.code == 130
    assert capsys.readouterr().err == "stopped; the same command starts from the beginning\n"


def test_ctrl_c_names_the_resumption_that_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_command(_stop)
    assert capsys.readouterr().err == "stopped; the same command continues from what was saved, if anything was\n"


def test_a_path_that_no_file_system_takes_is_one_short_line() -> None:
    """Guards against a traceback, and against a screen full of the path."""
    result = run_module("pipeline.report", "x" * 5000, check=False)
    assert result.returncode == 2 and ": File name too long: check the path" in result.stderr and len(result.stderr) < 700


def test_all_commands_on_one_screen() -> None:
    """Guards against a front door that scrolls away, and a command without a word of what it does."""
    for program in ("pervit", "python -m pipeline"):
        lines = overview(program).splitlines()
        assert len(lines) <= 24 and max(map(len, lines)) <= 80
        for purpose, commands in COMMANDS.items():
            first = next(i for i, line in enumerate(lines) if line.startswith(purpose))
            for line, name in zip(lines[first:], commands):
                assert line[12:].split()[0] == name and len(line[27:].split()) > 2, line


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "error: pervit requires a command, such as train: `pervit --help` lists them.\n"),
        (["trian", "--config", "x"], "error: pervit has no command 'trian': did you mean train?\n"),
        (["--verbose"], "error: pervit has no command '--verbose': `pervit --help` lists them.\n"),
    ],
)
def test_no_such_command(
    words: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against a KeyError, and a page of help for a letter."""
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/pervit", *words])
    with pytest.raises(SystemExit) as ended:
        command()
    assert (ended.value.code, *capsys.readouterr()) == (2, "", sentence)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--lr 1e-3 --config demo", "config keys are not options, got --lr: write optim.lr=1e-3."),
        ("--config demo --lr=-1", "config keys are not options, got --lr=-1: write optim.lr=-1."),
        ("--optim.lr -1", "config keys are not options, got --optim.lr: write optim.lr=-1."),
        ("--warmup-prefix", "config keys are not options, got --warmup-prefix: write optim.warmup_prefix=true."),
        ("--seed", "config keys are not options, got --seed: write seed=VALUE."),
        ("--epoch 3", "config keys are not options, got --epoch: write train.epochs=3."),
        ("--batch-size 64", "got --batch-size: write train.global_batch_size=64 or train.micro_batch_size=64"),
    ],
)
def test_a_key_that_is_written_as_an_option(words: str, sentence: str) -> None:
    """Guards against "unrecognized arguments: --lr", after which one searches the help for a learning rate."""
    for module in ("pipeline.train", "pipeline.plan"):
        parser = override_parser(module, "")
        parser.add_argument("--config")
        with pytest.raises(UserError, match=re.escape(sentence)):
            parser.parse_intermixed_args(words.split())


def test_options_stay_options() -> None:
    """Guards against a command's own option, or the beginning of one, that is taken for a key."""
    parser = override_parser("pipeline.train", "")
    parser.add_argument("--micro-batch")
    given = parser.parse_intermixed_args(["optim.lr=1", "--micro", "3", "seed=2"])
    assert (given.micro_batch, given.overrides) == ("3", ["optim.lr=1", "seed=2"])
