"""Run any command of the package: ``pervit COMMAND``, which is ``python -m pipeline COMMAND``.

Answers ``--help`` and mistakes without importing a command, of which some take seconds.
"""

import ast
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

from pipeline.command_line import COMMANDS, run_command, typed
from pipeline.errors import UserError, did_you_mean

MODULES = {name: module for commands in COMMANDS.values() for name, module in commands.items()}
_PACKAGES = Path(__file__).parents[1]  # ``pipeline`` and ``data_prep`` are installed together


def main() -> None:
    """Run the command that the first word names; it ends the process."""
    program = typed("pipeline")
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in ("-h", "--help"):
        print(overview(program))
        return
    if name not in MODULES:
        problem = f"{program} has no command {name!r}" if name else f"{program} requires a command, such as train"
        raise UserError(f"{problem}: {did_you_mean(name, MODULES, f'`{program} --help` lists them.')}")
    sys.argv = [f"{sys.argv[0]} {name}", *sys.argv[2:]]  # what the command's own help is called
    run_command(import_module(home(MODULES[name])).main)


def overview(program: str) -> str:
    """All commands, grouped by purpose; fits a terminal of 24 lines and 80 columns."""
    lines = [f"usage: {program} COMMAND ...; COMMAND --help explains it, with examples"]
    for purpose, commands in COMMANDS.items():
        for name, module in commands.items():
            lines.append(f"{purpose:<12}{name:<15}{_summary(module)}")
            purpose = ""
    return "\n".join(lines)


def _summary(module: str) -> str:
    """What a command does: the first clause of its module's docstring, read without importing it."""
    path = _PACKAGES / f"{home(module).replace('.', '/')}.py"
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return text.partition("\n")[0].partition(":")[0].rstrip(".")


def home(module: str) -> str:
    """The file to run for a module: a package has a ``__main__``."""
    return f"{module}.__main__" if (_PACKAGES / module.replace(".", "/")).is_dir() else module


command = partial(run_command, main)  # what the script pervit calls

if __name__ == "__main__":
    command()
