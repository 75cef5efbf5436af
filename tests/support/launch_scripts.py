"""The scripts of ``launch/``, run with a module that writes down what it was given."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from support.launching import PATIENCE, REPOSITORY, clean_environment

NOTE = "import json, os, sys\nwith open('note', 'w') as file:\n    json.dump({'arguments': sys.argv[1:], **os.environ}, file)\n"


def launch(script: str | Path, *words: str, cwd: Path = REPOSITORY, **variables: str) -> subprocess.CompletedProcess:
    command = ["bash", str(REPOSITORY / "launch" / script), *words]
    return subprocess.run(
        command, cwd=cwd, env=clean_environment(**variables), capture_output=True, text=True, timeout=PATIENCE
    )


def the_sentence(result: subprocess.CompletedProcess) -> str:
    assert (result.returncode, result.stdout) == (2, ""), result
    (sentence,) = result.stderr.splitlines()
    return sentence


def write_python(folder: Path, command: str, name: str = "python") -> Path:
    """A ``python``, or another command, that is a shell script."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{command}\n")
    (folder / name).chmod(0o755)
    return folder


def copied_scripts(folder: Path) -> Path:
    """A copy of the scripts, with a ``.venv`` that leaves its mark in the environment."""
    root = folder / "a repository"
    for name in ("launch", "configs"):
        shutil.copytree(REPOSITORY / name, root / name)
    (root / "note.py").write_text(NOTE)
    write_python(root / ".venv" / "bin", f'export MARK=venv; exec "{sys.executable}" "$@"')
    return root
