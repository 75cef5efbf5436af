"""Parse YAML strictly: every malformed input is a ``ValueError`` of one line, or, of an option, a ``UserError``."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

import yaml

from pipeline.errors import UserError

_LONG = 80  # characters of a value that a message shows
_DEEPEST = 32  # levels of nesting: PyYAML's time is quadratic in them, and it recurses until Python's stack overflows


def parse_value(text: str) -> Any:
    """Parse a YAML document.

    Returns:
        Plain Python: dictionaries, lists, strings, numbers, booleans, dates, None.

    Raises:
        ValueError: invalid YAML; the message is one line that fits "... is not a YAML value (MESSAGE)".
    """
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        reason = error.problem or error.context or "it cannot be parsed"
        if error.problem_mark and "\n" in text.strip():
            reason += f" in line {error.problem_mark.line + 1}"
    except yaml.reader.ReaderError as error:
        reason = f"the character U+{error.character:04X} is not allowed"
    except Exception as error:  # PyYAML passes on Python's own errors, for example for the escape "\\U99999999"
        reason = _reason(error)
    raise ValueError(" ".join(reason.split()))


def parse_switches(changes: Sequence[str]) -> dict[str, Any]:
    """The values of ``--switch`` by name, from changes ``name=value``, the value in YAML.

    Raises:
        UserError: a change is not of that form.
    """
    switches: dict[str, Any] = {}
    for change in changes:
        name, equals, value = change.partition("=")
        try:
            if not equals or not name:
                raise ValueError("a name or the = is missing")
            switches[name] = parse_value(value)
        except ValueError as error:
            raise UserError(
                f"--switch {shown(change)} is not of the form name=value ({error})", "write for example mask_content_layers=10"
            ) from None
    return switches


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else "a value does not match its tag"


class _StrictLoader(yaml.SafeLoader):
    """Rejects duplicate keys (PyYAML silently keeps the last one), keys that are not strings, and recursive values."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.deep_construct = True  # builds a value before its parent is registered, so that an alias to a parent is an error
        self._depth = 0

    def fetch_flow_collection_start(self, TokenClass: type) -> None:
        self._refuse_depth(self.flow_level)
        super().fetch_flow_collection_start(TokenClass)

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._refuse_depth(self._depth)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def _refuse_depth(self, depth: int) -> None:
        if depth > _DEEPEST:
            raise yaml.scanner.ScannerError(problem="it is nested too deeply", problem_mark=self.get_mark())

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except yaml.YAMLError:
            raise
        except Exception as error:  # raised for `!!int x`, `!!bool x` or a date in month 13
            raise yaml.constructor.ConstructorError(problem=_reason(error), problem_mark=node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        seen = set()
        for key in keys:
            problem = ""
            if not isinstance(key, str):
                problem = f"the key {shown(key)} is not a string"
            elif key in seen:
                problem = f"the key {shown(key)} is given {keys.count(key)} times"
            if problem:
                raise yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Shortened(reprlib.Repr):
    """``repr`` with bounded length and depth."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = _LONG
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = 8
        self.maxlevel = 3

    def repr_int(self, value: int, level: int) -> str:
        if abs(value) >= 10**_LONG:
            return f"a number of more than {_LONG} digits"
        return repr(value)


def shown(value: Any) -> str:
    """A value for a message: ``repr``, shortened."""
    return _SHORTENED.repr(value)


_SHORTENED = _Shortened()
