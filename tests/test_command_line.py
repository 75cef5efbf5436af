"""What a command says when it is stopped."""

from __future__ import annotations

import importlib

import pytest

from pipeline.command_line import run_command


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
