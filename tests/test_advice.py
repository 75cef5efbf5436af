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

from pipeline.__main__ import MODULES
from support.launching import PATIENCE, REPOSITORY, clean_environment
from test_packaging import PROJECT

FILES = sorted(path for folder in ("pipeline", "data_prep") for path in (REPOSITORY / folder).rglob("*.py"))


def ask_for_help(folder: Path, *command: object) -> str:
    environment = clean_environment(PYTHONPATH=str(REPOSITORY))
    command = [sys.executable, *map(str, command), "--help"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def shown_by(tmp_path: Path, script: str, function: str, *words: str) -> str:
    """The help of an installed program."""
    module, name = function.split(":")
    (tmp_path / script).write_text(f"from {module} import {name}\n{name}()\n")  # as pip writes it
    return ask_for_help(tmp_path, script, *words)


@pytest.mark.parametrize("name", MODULES)
def test_help_has_the_name_that_was_typed(name: str, tmp_path: Path) -> None:
    """Guards against `pervit train --help` that speaks of `python -m pipeline.train`."""
    module = MODULES[name]
    for typed, shown in {
        f"pervit {name}": shown_by(tmp_path, "pervit", PROJECT["scripts"]["pervit"], name),
        f"python -m {module}": ask_for_help(tmp_path, "-m", module),
    }.items():
        assert shown.startswith(f"usage: {typed} ") and re.search(rf"^ *(\w+= )?{typed}( |$)", shown, re.MULTILINE), (
            "an example"
        )
        other = "python -m (?!examples)" if typed.startswith("pervit") else r"pervit (?=[a-z])"
        assert re.search(other, shown) is None, shown
        assert set(re.findall(r"(?<!/)pervit ([a-z][a-z-]+)", shown)) <= MODULES.keys()


@pytest.mark.parametrize("script", [script for script in PROJECT["scripts"] if script != "pervit"])
def test_a_command_with_a_program_of_its_own(script: str, tmp_path: Path) -> None:
    shown = shown_by(tmp_path, script, PROJECT["scripts"][script])
    assert shown.startswith(f"usage: {script} ") and re.search(rf"^ *{script} ", shown, re.MULTILINE), "an example"
    assert "python -m" not in shown


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
