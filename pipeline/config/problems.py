"""Translate pydantic's validation errors into one sentence that names the key and where its value was set."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pipeline.config.bounds import Section
from pipeline.config.describe import flatten, section_fields
from pipeline.config.sections import Config
from pipeline.config.suggestions import unknown_key
from pipeline.config.values import shown

_KEY = re.compile(r"[a-z_]+(?:\.[a-z_]+)*")
_LONG = 200  # characters after which pydantic's or the user's text is cut


@dataclass(frozen=True)
class Layer:
    """The keys set by one file or override."""

    label: str  # for messages, such as "config configs/pervit_t.yaml"
    tree: dict
    file: Path | None = None  # that it was read from

    def sets(self, path: Iterable[object]) -> bool:
        """Whether this layer sets the value at ``path`` (section, key, index within the value), or part of it."""
        at: Any = self.tree
        for name in path:
            if not isinstance(at, dict):
                return True
            if name not in at:
                return False
            at = at[name]
        return True


def describe(error: ValidationError, layers: list[Layer], root: type[Section] = Config) -> str:
    """The first problem as one sentence.

    Args:
        error: from validating a complete config.
        layers: all layers; later ones override earlier ones.
        root: the config's class.
    """
    problem = error.errors(include_url=False)[0]
    loc, message = problem["loc"], _message(problem)
    key = ".".join(str(part) for part in loc[:2] if not isinstance(part, int))
    if loc[:2] == ("data", "mix") and len(loc) > 2:
        key += f"[{str(loc[2])!a:.80}]"
    return f"{_source(loc, message, layers, root)}: {_complaint(problem, key, message, _missing(error, loc), root)}"


def _message(problem: ErrorDetails) -> str:
    text = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return text if len(text) <= _LONG else text[:_LONG] + "..."


def _missing(error: ValidationError, loc: tuple) -> int:
    """How many items of a fixed-length list are missing."""
    return sum(other["type"] == "missing" and other["loc"][:-1] == loc[:-1] for other in error.errors())


def _source(loc: tuple, message: str, layers: list[Layer], root: type[Section]) -> str:
    """The layer that set the value. For an error across several keys, which the message names: the last layer that set one."""
    paths = [loc]
    if len(loc) < 2:
        named = [(*loc, *word.split(".")) for word in _KEY.findall(message)]
        paths = [path for path in named if ".".join(map(str, path)) in flatten(root())] or [loc]
    setting = (layer for layer in reversed(layers) if any(layer.sets(path) for path in paths))
    return next(setting, layers[-1] if loc else layers[0]).label


def _complaint(problem: ErrorDetails, key: str, message: str, missing: int, root: type[Section]) -> str:
    kind, found = problem["type"], problem["input"]
    if kind == "extra_forbidden":
        return unknown_key(key, found, root)
    if kind == "missing":
        return f"{key} has {len(found)} value{'' if len(found) == 1 else 's'}, {'one' if missing == 1 else missing} more needed: add {'it' if missing == 1 else 'them'}."
    if kind == "too_long" and isinstance(found, list | tuple):
        return f"{key} has {len(found)} values, {problem['ctx']['max_length']} needed: remove the others."
    if kind in ("model_type", "dict_type"):
        return f"{key or 'the config'} is {shown(found)}, but it is a section: write {key}.NAME=VALUE."
    if kind in ("tuple_type", "list_type"):
        return f"{key} is {shown(found)}, a list needed: write {key}={_as_list(key, found, root)}."
    if kind == "string_type" and isinstance(found, int | float | datetime.date):
        sort = "a date" if isinstance(found, datetime.date) else "a number"
        value = str(found) if isinstance(found, datetime.date) else shown(found)
        return f"{key} is {value}, which YAML reads as {sort}, a string needed: put it in quotes."
    if kind == "value_error" and isinstance(found, dict | Section):
        return f"{key + ': ' if key else ''}{message}: correct it."
    return f"{key} is {shown(found)} ({type(found).__name__}), but the value {message}: correct it."


def _as_list(key: str, found: Any, root: type[Section]) -> str:
    """A suggestion: the given values in brackets if their number is right, else the default, or an example where that is none."""
    section, _, name = key.rpartition(".")
    field = section_fields(section, root)[name]
    default = field.examples[0] if field.examples else field.default
    parts = found.split(",") if isinstance(found, str) else [shown(found)]
    needed = len(default) if isinstance(default, tuple) else len(parts)
    words = [part.strip() for part in parts] if len(parts) == needed else [str(part) for part in default]
    text = f"[{','.join(words)}]"
    return text if len(text) <= _LONG and text.isprintable() else str(list(default)).replace(" ", "")
