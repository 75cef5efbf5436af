"""Every key of a config with its default and meaning, as a Markdown table.

python -m pipeline.config                 all of them, as in README.md
python -m pipeline.config optim train.    those whose names begin so
python -m pipeline.config --recipes       the configs that --config takes by name, and their folder
"""

from __future__ import annotations

from typing import NoReturn

from pipeline.command_line import command_parser
from pipeline.config import flatten, markdown_table, shipped_recipes
from pipeline.config.sections import Config
from pipeline.errors import UserError, run_command


def main() -> None:
    parser = command_parser("pipeline.config", __doc__)
    parser.add_argument("beginnings", nargs="*", metavar="KEY", help="a key, or how some begin; default: all")
    parser.add_argument("--recipes", action="store_true", help="list configs in place of keys")
    args = parser.parse_args()
    if args.recipes:
        print("\n".join(recipe_names()))
        return
    beginnings = tuple(args.beginnings)
    for beginning in beginnings:
        if not any(key.startswith(beginning) for key in flatten(Config())):
            raise UserError(f"no key begins with {beginning!r}: leave it out to see all of them.")
    print(markdown_table(beginnings or ("",)))


def recipe_names() -> list[str]:
    """The folder of the shipped configs, then each one's name; ``base/`` holds what they share, no runs."""
    folder = shipped_recipes()
    names = (path.relative_to(folder).with_suffix("").as_posix() for path in sorted(folder.rglob("*.yaml")))
    return [f"# {folder}", *(name for name in names if not name.startswith("base/"))]


def command() -> NoReturn:
    """``python -m pipeline.config``."""
    run_command(main)


if __name__ == "__main__":
    command()
