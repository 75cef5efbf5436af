"""Print every config key with its default and meaning: or a config in full.

    pervit config                 all keys
    pervit config optim train.    keys with one of these prefixes
    pervit config --markdown      the page docs/config.md of the repository
    pervit config --recipes       the configs that --config takes by name, and their folder
    pervit config --config ablations/pervit_table1_e_no_cpe    a config in full, as a file, with what it is in its first lines
    pervit config --config pervit_t optim.lr=1e-3       the same, with overrides

--config takes a file, or the name of a shipped config.
"""

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from itertools import takewhile

import yaml

from pipeline.command_line import command_parser, run_command
from pipeline.config.loading import find_recipe, load_config, shipped_names
from pipeline.config.sections import Config, config_to_yaml, flatten, section_fields
from pipeline.config.tables import PaperRow, header, shipped_recipes
from pipeline.config.values import Section
from pipeline.errors import UserError


def main() -> None:
    parser = command_parser("pipeline.config", __doc__)
    parser.add_argument("beginnings", nargs="*", metavar="KEY", help="a key or its beginning; with --config: an override")
    parser.add_argument("--recipes", action="store_true", help="list the shipped configs instead of the keys")
    parser.add_argument("--config", metavar="CONFIG", help="print this config, a file or a name, with its bases and defaults")
    parser.add_argument("--markdown", action="store_true", help="print the page docs/config.md of the repository")
    args = parser.parse_args()
    if args.markdown:
        print(markdown_page(), end="")
    elif args.config:
        print(whole_config(args.config, args.beginnings), end="")
    elif args.recipes:
        names = (name for name in shipped_names() if not name.startswith("base/"))  # which are no runs
        print("\n".join([f"# {shipped_recipes()}", *names]))
    else:
        for beginning in args.beginnings:
            if not any(key.startswith(beginning) for key in flatten(Config())):
                raise UserError(f"no key begins with {beginning!r}", "run the command without it to list all keys")
        print(key_list(tuple(args.beginnings) or ("",), shutil.get_terminal_size().columns))


def whole_config(name: str, overrides: Sequence[str] = ()) -> str:
    """A config as a file without a base: the comments that it begins with, which for a row of a table come from there; every key."""
    recipe = find_recipe(name)
    if isinstance(recipe, PaperRow):
        comments = header(str(recipe.config))
    else:
        lines = recipe.read_text(encoding="utf-8").splitlines(keepends=True)
        comments = "".join(takewhile(lambda line: line.startswith("#"), lines))
    return comments + config_to_yaml(load_config(name, overrides))


def key_list(beginnings: tuple[str, ...], width: int) -> str:
    """Keys and defaults, the meaning below each, for a terminal of so many columns."""
    wrap = textwrap.TextWrapper(width - 4, initial_indent="    ", subsequent_indent="    ").wrap
    parts = ([f"{key}={default}", *wrap(meaning.replace("`", ""))] for key, default, meaning in _described(beginnings, Config))
    return "\n\n".join("\n".join(part) for part in parts)


def markdown_table(beginnings: tuple[str, ...] = ("",), root: type[Section] = Config) -> str:
    """Markdown table of keys, defaults and meanings. ``beginnings``: only keys that start with one of them."""
    rows = [f"| `{key}` | `{default}` | {meaning} |" for key, default, meaning in _described(beginnings, root)]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows])


def _described(beginnings: tuple[str, ...], root: type[Section]) -> Iterator[tuple[str, str, str]]:
    """Key, default as it is written in a config, and meaning of each key with one of the prefixes."""
    for key, default in flatten(root()).items():
        if key.startswith(beginnings):
            section, _, name = key.rpartition(".")
            shown = yaml.safe_dump(default, default_flow_style=True).split("\n")[0]
            yield key, shown, section_fields(section, root)[name].description or ""


_PAGE = """<!-- Generated, in the repository: pervit config --markdown > docs/config.md -->
# Config keys

A config is a YAML file. The key `base: other.yaml` starts from another file, relative to this one; the file then
states only what differs. `--config` takes a file, or the name of a shipped config such as `pervit_t` or
`ablations/pervit_table1_e_no_cpe`; `pervit config --recipes` lists them.

Any key can be overridden on the command line: `train.epochs=100`. The value is YAML, except for keys that take text: there it is
taken verbatim, so `output_dir="runs/exp #2"` needs only the shell's quotes, and `null` still means none. Later overrides win. An
unknown key, a wrong type and a value far beyond any recipe are errors that name the key.

`pervit config` prints these keys in a terminal, `pervit config optim` a part of them. Which keys may change
when a run is resumed: [Training](training.md#resume).
"""


def markdown_page() -> str:
    """The page ``docs/config.md``: how a config is written, then a table for each section."""
    top = tuple(name for name in Config.model_fields if not section_fields(name))
    parts = [_PAGE, "## Top level\n", markdown_table(top) + "\n"]
    for name, field in Config.model_fields.items():
        if section_fields(name):
            doc = (vars(field.annotation).get("__doc__") or "").partition("\n")[0]
            parts += [f"## `{name}`\n", *([doc + "\n"] if doc else []), markdown_table((f"{name}.",)) + "\n"]
    return "\n".join(parts)


if __name__ == "__main__":
    run_command(main)
