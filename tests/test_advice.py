"""The commands that help and sentences name: as they were typed, and such that they work in an installed package too."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from pipeline import errors
from pipeline.__main__ import MODULES
from pipeline.errors import install_extra
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
    """Guards against a usage line that is not what was typed, and examples of commands that do not exist."""
    module = MODULES[name]
    for typed, shown in {
        f"pervit {name}": shown_by(tmp_path, "pervit", PROJECT["scripts"]["pervit"], name),
        f"python -m {module}": ask_for_help(tmp_path, "-m", module),
    }.items():
        assert shown.startswith(f"usage: {typed} ")
        assert re.search(rf"^ *(\w+= )?pervit {name}( |$)", shown, re.MULTILINE), "an example"
        assert set(re.findall(r"(?<!/)pervit ([a-z][a-z-]+)", shown)) <= MODULES.keys()


@pytest.mark.parametrize("script", [script for script in PROJECT["scripts"] if script != "pervit"])
def test_a_command_with_a_program_of_its_own(script: str, tmp_path: Path) -> None:
    shown = shown_by(tmp_path, script, PROJECT["scripts"][script])
    assert shown.startswith(f"usage: {script} ") and re.search(r"^ *pervit [a-z]+ -", shown, re.MULTILINE), "an example"
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

    texts = [path.read_text() for path in FILES]
    modules = {module for text in texts for module in re.findall(r"python -m ([\w.]+\w)", text)}
    assert [module for module in modules if not find_spec(module)] == []
    advised = {command for text in texts for command in re.findall(r"pervit (?!import)([a-z-]+) (?:-|[A-Z]{3}|{)", text)}
    assert len(advised) > 8 and advised <= MODULES.keys()
    assert [path for path in FILES if re.search(r"python (data_prep|pipeline)/", path.read_text())] == [
        REPOSITORY / "pipeline" / "command_line.py"
    ]


def test_an_extra_is_installed_as_this_copy_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against `pip install 'pervit-pipeline[x]'`, which no registry has, and a wheel of torchvision that does not load."""
    in_clone = f"pip install -e '{REPOSITORY}[insight]' -c '{REPOSITORY}/constraints.txt'"
    monkeypatch.chdir(tmp_path)
    assert shlex.split(install_extra("insight")) == shlex.split(in_clone)
    monkeypatch.chdir(REPOSITORY)
    assert install_extra("insight") == "pip install -e '.[insight]' -c constraints.txt"
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "site-packages" / "pipeline" / "errors.py"))
    wanted = {Requirement(text) for text in PROJECT["optional-dependencies"]["insight"]}
    assert {Requirement(word) for word in shlex.split(install_extra("insight"))[2:]} == wanted
    for build, advice in (
        ("2.13.0", "pip install 'timm<"),
        ("2.13.0+cpu", "not beside 2.13.0+cpu; in a second environment, or "),
    ):
        monkeypatch.setattr(metadata, "version", lambda name, build=build: build)
        assert advice in install_extra("timm")
    assert install_extra("timm").endswith("pip uninstall torch torchvision, run: pip install torch==2.13.0 torchvision timm")


BROKEN = """raise RuntimeError("operator torchvision::nms does not exist")\n"""


@pytest.mark.parametrize("words", [["pipeline.models.for_timm"], ["pipeline.models", "timm:resnet18"]])
def test_torchvision_of_another_build_is_one_sentence(words: list[str], tmp_path: Path) -> None:
    """Guards against torchvision's traceback, where PyPI's wheel lies beside the CPU build of PyTorch."""
    for name, text in (("timm", "import torchvision\n"), ("torchvision", BROKEN)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    program = "import sys; from pipeline.command_line import run_command; from importlib import import_module as load\n"
    program += "run_command(lambda: getattr(load(sys.argv.pop(1)), 'main', int)())"
    module = "pipeline.models.__main__" if words[1:] else words[0]
    done = subprocess.run(
        [sys.executable, "-c", program, module, *words[1:]],
        env=clean_environment(PYTHONPATH=f"{tmp_path}:{REPOSITORY}"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    (sentence,) = done.stderr.splitlines()
    assert done.returncode == 2 and "cannot be imported (operator torchvision::nms does not exist): " in sentence
