"""`pervit`, and what a command says when it is stopped."""

from __future__ import annotations

import importlib
import sys

import pytest

from pipeline.__main__ import command, overview
from pipeline.command_line import COMMANDS, run_command


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
        command.command()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "stopped; the same command starts from the beginning\n"


def test_ctrl_c_names_the_resumption_that_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_command(_stop)
    assert capsys.readouterr().err == "stopped; the same command continues from what is saved\n"


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
