"""Which Python the scripts of ``launch/`` take."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from support.launch_scripts import copied_scripts, launch, the_sentence, write_python


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return copied_scripts(tmp_path)


@pytest.fixture
def bare(tmp_path: Path) -> str:
    """A PATH whose python has the standard library alone, as a system's."""
    folder = write_python(tmp_path / "bare", f'exec "{sys.executable}" -I -S "$@"')
    return f"{folder}:/usr/bin:/bin"


def run_note(repository: Path, **variables: str) -> dict:
    result = launch(repository / "launch" / "local.sh", "1", "--", "note", "a b", cwd=repository, **variables)
    assert result.returncode == 0, result.stderr
    return json.loads((repository / "note").read_text())


def test_without_activate(repository: Path, bare: str) -> None:
    """Guards against "No module named 'torch'" beside a .venv that has it."""
    note = run_note(repository, PATH=bare)
    assert (note["MARK"], note["arguments"]) == ("venv", ["a b"])


@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="the tests' python is in no environment")
def test_the_active_environment_wins(repository: Path) -> None:
    """Guards against a .venv that takes the place of the environment that was activated."""
    assert "MARK" not in run_note(repository)


def test_named_environment(repository: Path, tmp_path: Path, bare: str) -> None:
    """Guards against PERVIT_VENV that is ignored, or wrong in silence."""
    write_python(tmp_path / "other" / "bin", f'export MARK=other; exec "{sys.executable}" "$@"')
    assert run_note(repository, PATH=bare, PERVIT_VENV=str(tmp_path / "other"))["MARK"] == "other"
    assert "PERVIT_VENV must have bin/python" in the_sentence(launch("local.sh", "1", "--", "note", PERVIT_VENV=str(tmp_path)))


def test_nothing_installed(repository: Path, bare: str) -> None:
    """Guards against a traceback about a missing module, once for every rank."""
    shutil.rmtree(repository / ".venv")
    sentence = the_sentence(launch(repository / "launch" / "local.sh", "2", "--", "note", PATH=bare))
    assert "must have PyTorch and DeepSpeed" in sentence and "make install" in sentence


def test_no_secret(repository: Path) -> None:
    """Guards against ranks that start without the secret by which they know each other's messages."""
    shutil.rmtree(repository / ".venv")
    broken = write_python(repository / ".venv" / "bin", f'case "$*" in *secrets*) exit 1 ;; esac; exec "{sys.executable}" "$@"')
    result = launch(repository / "launch" / "local.sh", "1", "--", "note", cwd=repository, PERVIT_VENV=str(broken.parent))
    assert "it must give a free port and random numbers" in the_sentence(result)
    assert not (repository / "note").exists()
