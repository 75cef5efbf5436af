"""Prints the README's table of all keys.

    python -m pipeline.config
    python -m pipeline.config --recipes
"""

from __future__ import annotations

import argparse
from typing import NoReturn

from pipeline.config import markdown_table, shipped_recipes
from pipeline.errors import run_command


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.config", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", action="store_true", help="list the configs that --config takes by name, and their folder")
    if not parser.parse_args().recipes:
        print(markdown_table())
        return
    folder = shipped_recipes()
    print(f"# {folder}")
    for path in sorted(folder.rglob("*.yaml")):
        if path.parent.name != "base":  # what configs share, no runs
            print(path.relative_to(folder).with_suffix("").as_posix())


def command() -> NoReturn:
    """``python -m pipeline.config``."""
    run_command(main)


if __name__ == "__main__":
    command()
