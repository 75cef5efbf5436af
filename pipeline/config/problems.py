"""What pydantic finds wrong with a config, as one sentence that names the key and where its value was set."""

from __future__ import annotations

import datetime
import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from pipeline.config.describe import flatten
from pipeline.config.sections import Config, Section
from pipeline.config.values import shown

_KEY = re.compile(r"[a-z_]+(?:\.[a-z_]+)*")
_LONG = 200  # characters of a message in somebody else's words


@dataclass(frozen=True)
class Layer:
    """The keys that one file or override sets."""

    label: str  # as a sentence names it, such as "config configs/pervit_t.yaml"
    tree: dict

    def sets(self, path: Iterable[object]) -> bool:
        """Whether the value at ``path`` (a section, a key, what is inside a value), or a part of it, comes from here."""
        at: Any = self.tree
        for name in path:
            if not isinstance(at, dict):
                return True
            if name not in at:
                return False
            at = at[name]
        return True


def describe(error: ValidationError, layers: list[Layer]) -> str:
    """The first thing that is wrong, as one sentence.

    Args:
        error: from validating a whole :class:`Config`.
        layers: what was set, later ones over earlier ones.
    """
    problem = error.errors(include_url=False)[0]
    loc, message = problem["loc"], _message(problem)
    key = ".".join(str(part) for part in loc[:2] if not isinstance(part, int))
    return f"{_source(loc, message, layers)}: {_complaint(problem, key, message, _missing(error, loc))}"


def _message(problem: dict) -> str:
    text = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return text if len(text) <= _LONG else text[:_LONG] + "..."


def _missing(error: ValidationError, loc: tuple) -> int:
    """Values that a list lacks."""
    return sum(other["type"] == "missing" and other["loc"][:-1] == loc[:-1] for other in error.errors())


def _source(loc: tuple, message: str, layers: list[Layer]) -> str:
    """Where the value was set. A complaint about several keys names them: the latest that sets one of them is to blame."""
    paths = [loc]
    if len(loc) < 2:
        named = [(*loc, *word.split(".")) for word in _KEY.findall(message)]
        paths = [path for path in named if ".".join(map(str, path)) in flatten(Config())] or [loc]
    setting = (layer for layer in reversed(layers) if any(layer.sets(path) for path in paths))
    return next(setting, layers[-1] if loc else layers[0]).label


def _complaint(problem: dict, key: str, message: str, missing: int) -> str:
    kind, found = problem["type"], problem["input"]
    if kind == "extra_forbidden":
        return unknown_key(key, str(problem["loc"][-1]))
    if kind == "missing":
        return f"{key} has {len(found)} values, {'one' if missing == 1 else missing} more needed: add {'it' if missing == 1 else 'them'}."
    if kind == "too_long" and isinstance(found, list | tuple):
        return f"{key} has {len(found)} values, {problem['ctx']['max_length']} needed: leave out the others."
    if kind in ("model_type", "dict_type"):
        return f"{key or 'the whole'} is {shown(found)}, but it is a section: write {key}.name-of-a-key=value."
    if kind in ("tuple_type", "list_type"):
        return f"{key} is {shown(found)}, a list needed: write {key}={_as_list(key, found)}."
    if kind == "string_type" and isinstance(found, int | float | datetime.date):
        sort = "a date" if isinstance(found, datetime.date) else "a number"
        value = str(found) if isinstance(found, datetime.date) else shown(found)
        return f"{key} is {value}, which YAML reads as {sort}, text needed: put it in quotes."
    if kind == "value_error" and isinstance(found, dict | Section):
        return f"{key + ': ' if key else ''}{message}: correct it."
    return f"{key} is {shown(found)} ({type(found).__name__}), but the value {message}: correct it."


def unknown_key(key: str, name: str) -> str:
    """That there is no such key, and which was probably meant.

    Args:
        key: with its section, as far as it is known.
        name: its last part: a key may only lack its section.
    """
    known = [*flatten(Config()), *(name for name in Config.model_fields if section_fields(name))]
    leaf = {each.rpartition(".")[2]: each for each in known}
    close = [] if len(key) > _LONG else difflib.get_close_matches(key, known, n=1, cutoff=0.7)
    close = close or ([] if len(name) > _LONG else difflib.get_close_matches(name, leaf, n=1, cutoff=0.7))
    remedy = (
        f"did you mean {leaf.get(close[0], close[0])!r}?" if close else "remove it; `python -m pipeline.config` lists the keys."
    )
    return f"unknown key {shown(key)}: {remedy}"


def section_fields(name: str) -> dict[str, FieldInfo]:
    """The keys of a section, of the top level for an empty name; none for what is no section."""
    if not name:
        return Config.model_fields
    annotation = Config.model_fields[name].annotation if name in Config.model_fields else None
    return annotation.model_fields if isinstance(annotation, type) and issubclass(annotation, Section) else {}


def _as_list(key: str, found: Any) -> str:
    """What was probably meant: the same values in brackets if their number is right, else the default."""
    section, _, name = key.rpartition(".")
    field = section_fields(section)[name]
    parts = found.split(",") if isinstance(found, str) else [shown(found)]
    needed = len(field.default) if isinstance(field.default, tuple) else len(parts)
    words = [part.strip() for part in parts] if len(parts) == needed else [str(part) for part in field.default]
    text = f"[{','.join(words)}]"
    return text if len(text) <= _LONG and text.isprintable() else str(list(field.default)).replace(" ", "")
