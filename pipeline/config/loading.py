"""YAML files, their bases and overrides, into a :class:`Config`; what is wrong with them as one sentence."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import ValidationError

from pipeline.config.problems import Layer, describe, section_fields
from pipeline.config.recipes import find_recipe, shipped_recipes
from pipeline.config.sections import Config, Section
from pipeline.config.suggestions import unknown_key
from pipeline.config.values import parse_value, shown
from pipeline.errors import UserError

_DEEPEST = 3  # names of a dotted key: model.switches.NAME


def load_config(path: str | Path, overrides: list[str] = ()) -> Config:
    """Read a YAML file with its bases, apply ``dotted.key=value`` overrides, validate.

    An override's value is YAML, except that of a key which takes text: that is taken as it stands, so that
    ``output_dir=runs/exp #2`` and ``data.path=123`` mean what they say. Two exceptions: a value in quotes, ``'...'`` or
    ``"..."``, is what YAML makes of it, and where a key may be null, as ``train.init_from``, the word ``null`` is that.

    Args:
        path: the file, or the name of a config that the project brings along (:func:`find_recipe`).
        overrides: what differs.

    Raises:
        UserError: missing file, not YAML, unknown key, wrong type, value out of range.
    """
    layers = _read_with_bases(find_recipe(path), seen=())
    layers += [Layer(f"override {shown(override)}", _override(override)) for override in overrides]
    return _validate(layers)


def config_from_dict(tree: dict, source: str) -> Config:
    """Validate a nested dictionary.

    Args:
        tree: section -> key -> value.
        source: the file it came from, for the error.

    Raises:
        UserError: the first thing that is wrong, as one sentence.
    """
    return _validate([Layer(f"config {source}", tree)])


def _validate(layers: list[Layer]) -> Config:
    tree: dict = {}
    for layer in layers:
        tree = _merge(tree, layer.tree)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise UserError(describe(error, layers)) from None


def section_from_dict(section: type[Section], values: Mapping[str, Any], key: str) -> Section:
    """Validate the keys of one section that is not part of the tree, such as a model family's switches.

    Args:
        section: the class.
        values: name -> value.
        key: where the values stand in a config, for the error.

    Raises:
        UserError: the first thing that is wrong, as one sentence.
    """
    try:
        return section.model_validate(dict(values))
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(map(str, problem["loc"]))
        known = ", ".join(section.model_fields) or "none"
        if problem["type"] == "extra_forbidden":
            close = difflib.get_close_matches(name, section.model_fields, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"this model has: {known}."
            raise UserError(f"{key}: unknown switch {shown(name)}: {hint}") from None
        message = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
        where = f"{key}.{name}" if name else key
        raise UserError(f"{where} is {shown(problem['input'])}, but the value {message}: correct it.") from None


def _read_with_bases(path: Path, seen: tuple[Path, ...]) -> list[Layer]:
    """The file's layer on top of those of its bases."""
    if path.resolve() in seen:
        raise UserError(f"config file {path} is its own base ({' -> '.join(p.name for p in seen)}): remove one 'base:' line.")
    try:
        tree = parse_value(path.read_text(encoding="utf-8"))
    except ValueError as error:  # or UnicodeDecodeError, which is one
        raise UserError(f"config file {path} is not valid YAML ({error}): mend that line.") from None
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise UserError(
            f"config file {path} holds a {type(tree).__name__}, keys with values needed: see {shipped_recipes() / 'pervit_t.yaml'}."
        )
    base = tree.pop("base", None)
    layer = Layer(f"config {path}", tree)
    if base is None:
        return [layer]
    if not isinstance(base, str) or not base.isprintable():
        raise UserError(f"config file {path} has base: {shown(base)}, the name of a file needed: correct it.")
    return [*_read_with_bases(find_recipe(base, path.parent), (*seen, path.resolve())), layer]


def _override(text: str) -> dict:
    """The keys that ``dotted.key=value`` sets, as a tree."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UserError(f"override {shown(text)} is not of the form dotted.key=value: write for example train.epochs=100.")
    names = key.split(".")
    if len(names) > _DEEPEST:
        raise UserError(f"override {shown(text)}: {unknown_key(key)}")
    try:
        tree = _value_of(key, value)
    except ValueError as error:
        raise UserError(
            f"override {shown(text)}: what follows the = is not a YAML value ({error}): correct it, or quote it."
        ) from None
    for name in reversed(names):
        tree = {name: tree}
    return tree


def _value_of(key: str, text: str) -> Any:
    """What the command line gives a key; see :func:`load_config`."""
    section, _, name = key.rpartition(".")
    fields = section_fields(section)
    if name not in fields or not _takes_text(fields[name].annotation):
        return parse_value(text)
    if text == "null" and NoneType in get_args(fields[name].annotation):
        return None
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        try:
            inside = parse_value(text)
        except ValueError:
            return text
        return inside if isinstance(inside, str) else text
    return text


def _takes_text(annotation: Any) -> bool:
    """Whether text, or text or null, is all that a key takes."""
    parts = get_args(annotation)
    if get_origin(annotation) is Literal:
        return all(isinstance(part, str) for part in parts)
    if get_origin(annotation) is Annotated:
        return _takes_text(parts[0])
    if NoneType in parts:
        return all(part is NoneType or _takes_text(part) for part in parts)
    return annotation is str


def _merge(base: dict, over: dict) -> dict:
    """``over`` on top of ``base``; a section changes only the keys that it names."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged
