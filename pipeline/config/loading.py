"""Load YAML files, their bases and overrides into a validated :class:`Config`; parse command lines with overrides."""

import difflib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import ValidationError

from pipeline.command_line import CommandParser, command_parser
from pipeline.config.problems import Layer, complaint, describe, nearest_keys, unknown_key
from pipeline.config.sections import Config, flatten, section_fields
from pipeline.config.tables import PaperRow, find_row, row_names, shipped_recipes
from pipeline.config.values import Section, parse_value
from pipeline.errors import UserError, check_no_secrets, did_you_mean, printable, shown

AnySection = TypeVar("AnySection", bound=Section)

_OPTION = re.compile(r"--?([a-z][\w.-]*)(=.*)?", re.IGNORECASE | re.DOTALL)
_DEEPEST = 3  # parts of the longest dotted key: model.switches.NAME


def shipped_names() -> list[str]:
    """The names of the shipped configs: files of ``configs/``, and rows of its tables, such as ``ablations/pervit_table5_lrn``."""
    folder = shipped_recipes()
    return sorted([path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml")] + row_names())


def shipped_recipe(name: str) -> Path | PaperRow | None:
    """The file or the row of a shipped config, by its name without ``.yaml``; None if there is none of that name."""
    path = shipped_recipes() / f"{name}.yaml"
    if path.is_file():
        return path
    found = find_row(name)
    return found[1] if found else None


def find_recipe(name: str | Path, folder: Path = Path()) -> Path | PaperRow:
    """The file of a config, or the row of a paper's table that is one. ``name``: a path, relative to ``folder``, or a config's name with
    or without ``.yaml``: ``pervit_t``, ``ablations/pervit_table5_lrn``. Searched in this order: the path itself, ``configs/`` in the
    current folder, the shipped configs."""
    path, wanted = folder / name, f"{name}".removesuffix(".yaml")
    try:
        if path.is_file():
            return path
        own = Path("configs") / f"{wanted}.yaml"
        if not Path(name).is_absolute() and (found := own if own.is_file() else shipped_recipe(wanted)):
            return found
    except OSError as error:  # such as a name that is too long
        raise UserError(f"config {printable(str(path), 200)} cannot be read ({error.strerror})", "pass another file") from None
    raise UserError(f"config {path} does not exist, and no config of that name is in {shipped_recipes()}: {_meant(wanted)}")


def _meant(wanted: str) -> str:
    stems = {Path(recipe).name: recipe for recipe in shipped_names()}
    close = difflib.get_close_matches(Path(wanted).name, stems, n=1, cutoff=0.7)
    return f"did you mean {stems[close[0]]}?" if close else "pass a file or the name of a shipped config."


def load_config(path: str | Path | PaperRow, overrides: Sequence[str] = ()) -> Config:
    """Read a config, by what :func:`find_recipe` takes or gives, with its bases, apply ``dotted.key=value`` overrides, validate.

    Later overrides win. Their values are parsed as YAML, except for string keys, which take it literally, so that
    ``output_dir=runs/exp #2`` and ``data.path=123`` work unquoted. Two exceptions: a quoted value, ``'...'`` or ``"..."``, is
    parsed as YAML, and ``null`` means null for keys that allow it, such as ``train.init_from``. Raises UserError: missing file,
    invalid YAML, unknown key, wrong type or value out of range.
    """
    return load_config_as(Config, path, overrides)


def load_config_as(root: type[AnySection], path: str | Path | PaperRow, overrides: Sequence[str] = ()) -> AnySection:
    """:func:`load_config` for the config of another program, of the class ``root``; every key has a default."""
    layers = recipe_layers(path if isinstance(path, PaperRow) else find_recipe(path))
    layers += [Layer(f"override {shown(override)}", _override(override, root)) for override in overrides]
    return _validate(root, layers)


def config_from_dict(tree: dict, source: str) -> Config:
    """Validate a nested dictionary, section -> key -> value, of the file ``source``. Raises UserError: the first problem found."""
    return _validate(Config, [Layer(f"config {source}", tree)])


@dataclass(frozen=True)
class Recipe:
    """A config file, or a row of a table, by itself, without what a user has changed."""

    name: str  # of the file, and the row
    config: Config


def load_recipe(path: str | Path) -> Recipe | None:
    """The shipped config that a file is or begins from (``base:``), else the file itself; None: valid with overrides only."""
    layers, folder = recipe_layers(find_recipe(path)), shipped_recipes().resolve()
    shipped = [number for number, layer in enumerate(layers, 1) if layer.file and layer.file.resolve().is_relative_to(folder)]
    layers = layers[: shipped[-1]] if shipped else layers
    with suppress(UserError):
        return Recipe(layers[-1].label.removeprefix("config "), _validate(Config, layers))
    return None


def _validate(root: type[AnySection], layers: list[Layer]) -> AnySection:
    for layer in layers:
        for text in _texts(layer.tree):
            check_no_secrets(layer.label, text)
    try:
        return root.model_validate(reduce(_merge, [layer.tree for layer in layers], {}))
    except ValidationError as error:
        raise UserError(describe(error, layers, root)) from None


def _texts(tree: Any) -> Iterator[str]:
    """The strings of a tree, keys and values."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for part in tree.items() if isinstance(tree, dict) else tree:
            yield from _texts(part)


def section_from_dict(section: type[AnySection], values: Mapping[str, Any], key: str) -> AnySection:
    """Validate a section outside the :class:`Config` tree, such as a model family's switches. Raises UserError: the first
    problem found; it names ``key``, the dotted key that holds the values in a config."""
    try:
        return section.model_validate(dict(values))
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(map(str, problem["loc"]))
        if problem["type"] == "extra_forbidden":
            known = ", ".join(section.model_fields) or "none"
            hint = did_you_mean(name, section.model_fields, f"this model's switches are: {known}.", "{!r}")
            raise UserError(f"{key}: unknown switch {shown(name)}: {hint}") from None
        if not name:  # across several switches
            raise UserError(f"{key} {problem['msg'].removeprefix('Value error, ')}.") from None
        raise UserError(complaint(problem, f"{key}.{name}")) from None


def recipe_layers(recipe: Path | PaperRow, seen: tuple[Path | str, ...] = ()) -> list[Layer]:
    """The layers of the bases of a file or row, then its own: later layers override earlier ones."""
    itself = recipe.place if isinstance(recipe, PaperRow) else recipe.resolve()
    if itself in seen:
        shown_as = recipe.place if isinstance(recipe, PaperRow) else recipe
        chain = " -> ".join(Path(each).name for each in seen)
        raise UserError(f"config file {shown_as} is its own base ({chain})", "remove one 'base:' line")
    layer, base = _row_layer(recipe) if isinstance(recipe, PaperRow) else _file_layer(recipe)
    return [*(recipe_layers(base, (*seen, itself)) if base else []), layer]


def _file_layer(path: Path) -> tuple[Layer, Path | PaperRow | None]:
    """What a file says, and its base."""
    try:
        tree = parse_value(path.read_text(encoding="utf-8"))
    except ValueError as error:  # UnicodeDecodeError is a ValueError too
        raise UserError(f"config file {path} is not valid YAML ({error})", "fix that line") from None
    tree = {} if tree is None else tree
    if not isinstance(tree, dict):
        problem = f"config file {path} must hold a mapping of keys to values, got a {type(tree).__name__}"
        raise UserError(problem, f"see {shipped_recipes() / 'pervit_t.yaml'}")
    base = tree.pop("base", None)
    if base is not None and (not isinstance(base, str) or not base.isprintable()):
        raise UserError(f"config file {path}: base must be a file name, got {shown(base)}")
    return Layer(f"config {path}", tree, path), find_recipe(base, path.parent) if base is not None else None


def _row_layer(row: PaperRow) -> tuple[Layer, Path | PaperRow]:
    """What a row changes, with the keys that follow from its name and its part of the images; and its base, a shipped config whatever
    is in the current folder."""
    base = shipped_recipe(str(row.base))
    if base is None:
        raise UserError(f"config {row.place}: base must be a shipped config, got {row.base}: {_meant(str(row.base))}")
    try:
        trees = [row.derived, *(_override(change, Config) for change in row.change)]
    except UserError as error:
        raise UserError(f"config {row.place}: {error}") from None
    return Layer(f"config {row.place}", reduce(_merge, trees), row.file), base


def _override(text: str, root: type[Section]) -> dict:
    """``dotted.key=value`` as a nested dictionary."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UserError(f"override {shown(text)} is not of the form dotted.key=value", "write for example train.epochs=100")
    names = key.split(".")
    if len(names) > _DEEPEST:
        raise UserError(f"override {shown(text)}: {unknown_key(key, root=root)}")
    try:
        tree = _value_of(key, value, root)
    except ValueError as error:
        problem = f"override {shown(text)}: the text after the = is not valid YAML ({error})"
        raise UserError(problem, "correct it, or quote it") from None
    for name in reversed(names):
        tree = {name: tree}
    return tree


def _value_of(key: str, text: str, root: type[Section]) -> Any:
    """The value of an override: literal for string keys, else YAML; see :func:`load_config`."""
    section, _, name = key.rpartition(".")
    fields = section_fields(section, root)
    if name not in fields or not _takes_text(fields[name].annotation):
        return parse_value(text)
    if text == "null" and NoneType in get_args(fields[name].annotation):
        return None
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        with suppress(ValueError):
            inside = parse_value(text)
            return inside if isinstance(inside, str) else text
    return text


def _takes_text(annotation: Any) -> bool:
    """Whether the type is ``str``, an alias or literals of it, or one of these or None."""
    parts = get_args(annotation)
    if get_origin(annotation) is Literal:
        return all(isinstance(part, str) for part in parts)
    if get_origin(annotation) is Annotated:
        return _takes_text(parts[0])
    if NoneType in parts:
        return all(part is NoneType or _takes_text(part) for part in parts)
    return annotation is str


def _merge(base: dict, over: dict) -> dict:
    """Deep merge: ``over`` wins, key by key within sections."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def override_parser(
    module: str, description: str | None, epilog: str | None = None, example: str = "train.epochs=100"
) -> CommandParser:
    """A :func:`~pipeline.command_line.command_parser` with the overrides of a config as its positional arguments."""
    parser = command_parser(module, description, epilog)
    parser.add_argument("overrides", nargs="*", metavar="dotted.key=value", help=f"for example {example}")
    parser.look = refuse_keys_as_options
    return parser


def refuse_keys_as_options(words: Sequence[str], options: Collection[str]) -> None:
    """See that no word of a command line is a config key in the form of an option, such as ``--lr 1e-3``. ``options``: those that the
    command has, of which argparse takes beginnings too. Raises UserError: one is, or looks like one; it says the override."""
    for word, after in zip(words, [*words[1:], ""]):
        found = _OPTION.fullmatch(word)
        if word == "--":
            return
        if not found or any(option.startswith(word.partition("=")[0]) for option in options):
            continue
        name, defaults = found[1].replace("-", "_"), flatten(Config())
        keys = [name] if name in defaults else [key for key in nearest_keys(name) if key in defaults]
        if keys:
            value = after if after and "=" not in after and not _OPTION.fullmatch(after) else "VALUE"
            value = found[2][1:] if found[2] else "true" if value == "VALUE" and isinstance(defaults[keys[0]], bool) else value
            meant = " or ".join(f"{key}={value}" for key in keys)
            raise UserError(f"config keys are not options, got {word}", f"write {meant}")
