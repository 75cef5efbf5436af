"""YAML files, their bases and overrides, into a :class:`Config`; what is wrong with them as one sentence."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from pipeline.config.describe import flatten
from pipeline.config.recipes import find_recipe
from pipeline.config.sections import Config, Section
from pipeline.errors import UserError


def load_config(path: str | Path, overrides: list[str] = ()) -> Config:
    """Read a YAML file with its bases, apply ``dotted.key=value`` overrides (values are YAML), validate.

    Args:
        path: the file, or the name of a config that the project brings along (:func:`find_recipe`).
        overrides: what differs.

    Raises:
        UserError: missing file, not YAML, unknown key, wrong type, value out of range.
    """
    path = find_recipe(path)
    tree = _read_with_bases(path, seen=())
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise UserError(f"override {override!r} is not of the form dotted.key=value: write for example train.epochs=100.")
        try:
            _set(tree, key, yaml.safe_load(value))
        except yaml.YAMLError:
            raise UserError(
                f"override {override!r}: {value!r} is not a YAML value: quote it, for example {key}='\"text\"'."
            ) from None
    return config_from_dict(tree, source=str(path))


def config_from_dict(tree: dict, source: str) -> Config:
    """Validate a nested dictionary.

    Args:
        tree: section -> key -> value.
        source: the file it came from, for the error.

    Raises:
        UserError: the first thing that is wrong, as one sentence.
    """
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise UserError(_one_sentence(error.errors()[0], source)) from None


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
            raise UserError(f"{key}: unknown switch {name!r}: {hint}") from None
        message = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
        where = f"{key}.{name}" if name else key
        raise UserError(f"{where} is {problem['input']!r}, but the value {message}: correct it.") from None


def _read_with_bases(path: Path, seen: tuple[Path, ...]) -> dict:
    if path.resolve() in seen:
        raise UserError(f"config file {path} is its own base ({' -> '.join(p.name for p in seen)}): remove one 'base:' line.")
    try:
        tree = yaml.load(path.read_text(), Loader=_UniqueKeys)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = " ".join(str(error).split())
        raise UserError(f"config file {path} is not valid YAML ({problem}): mend that line.") from None
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise UserError(
            f"config file {path} holds a {type(tree).__name__}, keys with values needed: see configs/pervit_t.yaml."
        )
    base = tree.pop("base", None)
    if base is None:
        return tree
    return _merge(_read_with_bases(find_recipe(str(base), path.parent), (*seen, path.resolve())), tree)


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that is given twice, where YAML's own rule is that the last one wins silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"the key {key!r} is given {keys.count(key)} times, line {node.start_mark.line + 1} on")
        return super().construct_mapping(node, deep)


def _merge(base: dict, over: dict) -> dict:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _set(tree: dict, dotted: str, value: Any) -> None:
    """Set one key; a whole section given as a value changes only the keys that it names."""
    *sections, key = dotted.split(".")
    for section in sections:
        child = tree.get(section)
        tree[section] = dict(child) if isinstance(child, dict) else {}
        tree = tree[section]
    both = isinstance(value, dict) and isinstance(tree.get(key), dict)
    tree[key] = _merge(tree[key], value) if both else value


def _known_keys() -> list[str]:
    return list(flatten(Config())) + [name for name, field in Config.model_fields.items() if _is_section(field.annotation)]


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _one_sentence(problem: dict, source: str) -> str:
    parts = [str(part) for part in problem["loc"] if not isinstance(part, int)]
    key = ".".join(parts[:2])
    where = f"config ({source} and overrides)"
    if problem["type"] == "extra_forbidden":
        leaf = {known.rpartition(".")[2]: known for known in _known_keys()}
        close = difflib.get_close_matches(key, _known_keys(), n=1, cutoff=0.7) or difflib.get_close_matches(
            parts[-1], leaf, n=1, cutoff=0.7
        )
        remedy = f"did you mean {leaf.get(close[0], close[0])!r}?" if close else "remove it; README.md lists the keys."
        return f"{where}: unknown key {key!r}: {remedy}"
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
    found = problem["input"]
    if problem["type"] == "missing":
        return f"{where}: {key} has {len(found)} values, one more needed: add it."
    if problem["type"] in ("model_type", "dict_type"):
        return f"{where}: {key} is {found!r}, but it is a section: write {key}.name-of-a-key=value."
    if isinstance(found, (dict, Section)):
        return f"{where}: {key or 'the file'}: {message}: correct it."
    return f"{where}: {key} is {found!r} ({type(found).__name__}), but the value {message}: correct it."
