"""Load YAML files, their bases and overrides into a validated :class:`Config`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import ValidationError

from pipeline.config.problems import Layer, complaint, describe, unknown_key
from pipeline.config.sections import Config, section_fields
from pipeline.config.values import Section, parse_value, shown
from pipeline.errors import UserError

AnySection = TypeVar("AnySection", bound=Section)

_PACKAGE = Path(__file__).parent.parent
_DEEPEST = 3  # parts of the longest dotted key: model.switches.NAME


def shipped_recipes() -> Path:
    """The folder of the shipped configs: ``recipes/`` of the installed package, or ``configs/`` of a source checkout."""
    installed = _PACKAGE / "recipes"
    return installed if installed.is_dir() else _PACKAGE.parent / "configs"


def shipped_names() -> list[str]:
    """The names of the shipped configs, such as ``ablations/pervit_table5_lrn``."""
    folder = shipped_recipes()
    return [path.relative_to(folder).with_suffix("").as_posix() for path in sorted(folder.rglob("*.yaml"))]


def find_recipe(name: str | Path, folder: Path = Path()) -> Path:
    """The file of a config.

    Args:
        name: a path, or a config's name with or without ``.yaml``: ``pervit_t``, ``ablations/pervit_table5_lrn``. Searched in
            this order: the path itself, ``configs/`` in the current folder, the shipped configs.
        folder: the folder that a path is relative to.
    """
    path = folder / name
    if path.is_file():
        return path
    wanted = f"{name}".removesuffix(".yaml")
    places = [Path("configs"), shipped_recipes()]
    for place in places:
        candidate = place / f"{wanted}.yaml"
        if candidate.is_file() and not Path(name).is_absolute():
            return candidate
    stems = {Path(recipe).name: recipe for recipe in shipped_names()}
    close = difflib.get_close_matches(Path(wanted).name, stems, n=1, cutoff=0.7)
    remedy = f"did you mean {stems[close[0]]}?" if close else "pass a file or the name of a shipped config."
    raise UserError(f"config {path} does not exist, and no config of that name is in {places[1]}: {remedy}")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file with its bases, apply ``dotted.key=value`` overrides, validate.

    The value of an override is parsed as YAML, except for string keys, which take it literally, so that
    ``output_dir=runs/exp #2`` and ``data.path=123`` work unquoted. Two exceptions: a quoted value, ``'...'`` or ``"..."``, is
    parsed as YAML, and ``null`` means null for keys that allow it, such as ``train.init_from``.

    Args:
        path: a file, or the name of a shipped config (:func:`find_recipe`).
        overrides: later ones win.

    Raises:
        UserError: missing file, invalid YAML, unknown key, wrong type or value out of range.
    """
    return load_config_as(Config, path, overrides)


def load_config_as(root: type[AnySection], path: str | Path, overrides: Sequence[str] = ()) -> AnySection:
    """:func:`load_config` for the config of another program, of the class ``root``; every key has a default."""
    layers = _read_with_bases(find_recipe(path), seen=())
    layers += [Layer(f"override {shown(override)}", _override(override, root)) for override in overrides]
    return _validate(root, layers)


def config_from_dict(tree: dict, source: str) -> Config:
    """Validate a nested dictionary, section -> key -> value, of the file ``source``. Raises UserError: the first problem found."""
    return _validate(Config, [Layer(f"config {source}", tree)])


@dataclass(frozen=True)
class Recipe:
    """A config file by itself, without what a user has changed."""

    name: str  # of the file
    config: Config


def load_recipe(path: str | Path) -> Recipe | None:
    """The shipped config that a file is or begins from (``base:``); the file itself if it begins from none; None if it is
    valid with overrides only.
    """
    layers, folder = _read_with_bases(find_recipe(path), seen=()), shipped_recipes().resolve()
    shipped = [number for number, layer in enumerate(layers, 1) if layer.file and layer.file.resolve().is_relative_to(folder)]
    layers = layers[: shipped[-1]] if shipped else layers
    try:
        return Recipe(str(layers[-1].file), _validate(Config, layers))
    except UserError:
        return None


def _validate(root: type[AnySection], layers: list[Layer]) -> AnySection:
    try:
        return root.model_validate(reduce(_merge, [layer.tree for layer in layers], {}))
    except ValidationError as error:
        raise UserError(describe(error, layers, root)) from None


def section_from_dict(section: type[AnySection], values: Mapping[str, Any], key: str) -> AnySection:
    """Validate a section outside the :class:`Config` tree, such as a model family's switches. Raises UserError: the first problem found.

    Args:
        key: the dotted key that holds the values in a config, for error messages.
    """
    try:
        return section.model_validate(dict(values))
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(map(str, problem["loc"]))
        if problem["type"] == "extra_forbidden":
            known, close = ", ".join(section.model_fields) or "none", difflib.get_close_matches(name, section.model_fields, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"this model's switches are: {known}."
            raise UserError(f"{key}: unknown switch {shown(name)}: {hint}") from None
        if not name:  # across several switches
            raise UserError(f"{key} {problem['msg'].removeprefix('Value error, ')}.") from None
        raise UserError(complaint(problem, f"{key}.{name}")) from None


def _read_with_bases(path: Path, seen: tuple[Path, ...]) -> list[Layer]:
    """The layers of a file's bases, then its own: later layers override earlier ones."""
    if path.resolve() in seen:
        raise UserError(f"config file {path} is its own base ({' -> '.join(p.name for p in seen)})", "remove one 'base:' line")
    try:
        tree = parse_value(path.read_text(encoding="utf-8"))
    except ValueError as error:  # UnicodeDecodeError is a ValueError too
        raise UserError(f"config file {path} is not valid YAML ({error})", "fix that line") from None
    tree = {} if tree is None else tree
    if not isinstance(tree, dict):
        raise UserError(
            f"config file {path} must hold a mapping of keys to values, got a {type(tree).__name__}",
            f"see {shipped_recipes() / 'pervit_t.yaml'}",
        )
    base = tree.pop("base", None)
    layer = Layer(f"config {path}", tree, path)
    if base is None:
        return [layer]
    if not isinstance(base, str) or not base.isprintable():
        raise UserError(f"config file {path}: base must be a file name, got {shown(base)}")
    return [*_read_with_bases(find_recipe(base, path.parent), (*seen, path.resolve())), layer]


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
