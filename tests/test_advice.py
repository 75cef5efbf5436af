"""The commands that help and sentences name: as they were typed, and such that they work in an installed package too."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.launching import PATIENCE, REPOSITORY, clean_environment
from test_packaging import PROJECT

FILES = sorted(path for folder in ("pipeline", "data_prep") for path in (REPOSITORY / folder).rglob("*.py"))


def ask_for_help(folder: Path, *command: object) -> str:
    environment = clean_environment(PYTHONPATH=str(REPOSITORY))
    command = [sys.executable, *map(str, command), "--help"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("script", PROJECT["scripts"])
def test_help_has_the_name_that_was_typed(script: str, tmp_path: Path) -> None:
    """Guards against `pervit-train --help` that speaks of `python -m pipeline.train`."""
    module, function = PROJECT["scripts"][script].split(":")
    (tmp_path / script).write_text(f"from {module} import {function}\n{function}()\n")  # as pip writes it
    shown = ask_for_help(tmp_path, script)
    assert shown.startswith(f"usage: {script} ") and re.search(rf"^ *{script} ", shown, re.MULTILINE), "an example"
    assert "python -m" not in shown
    assert set(re.findall(r"pervit-[a-z-]+", shown)) <= PROJECT["scripts"].keys()

    module = module.removesuffix(".__main__")
    shown = ask_for_help(tmp_path, "-m", module)
    assert shown.startswith(f"usage: python -m {module} ") and "pervit-" not in shown
    assert re.search(rf"^ *python -m {module}\b", shown, re.MULTILINE)


def sentences(path: Path) -> Iterator[str]:
    """A file's strings, those with values in them too, as far as they are written down; docstrings are for readers of the code."""
    tree = ast.parse(path.read_text())
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    parts |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value


def test_what_is_advised_is_there() -> None:
    """Guards against a sentence that sends whoever has installed the package to a file or a command of the repository alone."""
    said = [sentence for path in FILES for sentence in sentences(path)]
    said.remove("README.md")  # no advice: the model card beside an export
    of_the_repository = [text for text in said if re.search(r"\b(launch|docs|configs)/\w|README|make install", text)]
    assert len(of_the_repository) > 8
    assert [text for text in of_the_repository if "repository" not in text] == []

    modules = {module for path in FILES for module in re.findall(r"python -m ([\w.]+\w)", path.read_text())}
    assert len(modules) > 8
    assert [module for module in modules if not find_spec(module)] == []
    assert [path for path in FILES if re.search(r"python (data_prep|pipeline)/", path.read_text())] == [
        REPOSITORY / "pipeline" / "command_line.py"
    ]
