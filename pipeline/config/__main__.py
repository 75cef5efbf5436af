"""Print every config key with its default and meaning, as a Markdown table.

python -m pipeline.config                 all keys, as in docs/config.md
python -m pipeline.config optim train.    keys with one of these prefixes
python -m pipeline.config --markdown      docs/config.md itself, with a section for each section of the config
python -m pipeline.config --recipes       the configs that --config takes by name, and their folder
"""

from __future__ import annotations

from typing import NoReturn

from pipeline.command_line import command_parser, run_command
from pipeline.config import flatten, markdown_table, shipped_recipes
from pipeline.config.describe import markdown_page
from pipeline.config.sections import Config
from pipeline.errors import UserError


def main() -> None:
    parser = command_parser("pipeline.config", __doc__)
    parser.add_argument("beginnings", nargs="*", metavar="KEY", help="a key or a prefix of keys (default: all)")
    parser.add_argument("--recipes", action="store_true", help="list the shipped configs instead of the keys")
    parser.add_argument("--markdown", action="store_true", help="print the page docs/config.md of the repository")
    args = parser.parse_args()
    if args.markdown:
        print(markdown_page(), end="")
        return
    if args.recipes:
        print("\n".join(recipe_names()))
        return
    beginnings = tuple(args.beginnings)
    for beginning in beginnings:
        if not any(key.startswith(beginning) for key in flatten(Config())):
            raise UserError(f"no key begins with {beginning!r}", "run the command without it to list all keys")
    print(markdown_table(beginnings or ("",)))


def recipe_names() -> list[str]:
    """The folder of the shipped configs, then their names, without those in ``base/``, which are not runs."""
    folder = shipped_recipes()
    names = (path.relative_to(folder).with_suffix("").as_posix() for path in sorted(folder.rglob("*.yaml")))
    return [f"# {folder}", *(name for name in names if not name.startswith("base/"))]


def command() -> NoReturn:
    """``python -m pipeline.config``."""
    run_command(main)


if __name__ == "__main__":
    command()
