"""YAML text into plain values: whatever is wrong with it is a ``ValueError`` of one line."""

from __future__ import annotations

import reprlib
from typing import Any

import yaml

_LONG = 80  # characters of a value that a sentence shows
_DEEPEST = 32  # levels of nesting; PyYAML's time grows with their square, and then Python's stack ends


def parse_value(text: str) -> Any:
    """The value that a YAML text stands for; :func:`pipeline.config.load_config` says how a key of type text takes it.

    Returns:
        Plain Python: mappings, lists, text, numbers, truth values, dates, None.

    Raises:
        ValueError: it stands for none. The message says why, in one line that fits "... is no YAML value (MESSAGE)".
    """
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        said = error.problem or error.context or "it cannot be read"
        if error.problem_mark and "\n" in text.strip():
            said += f" in line {error.problem_mark.line + 1}"
    except yaml.reader.ReaderError as error:
        said = f"the character U+{error.character:04X} is not allowed"
    except Exception as error:  # such as "\\U99999999", which PyYAML leaves to Python
        said = _reason(error)
    raise ValueError(" ".join(said.split()))


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else "it is not what it claims to be"


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that is given twice, where YAML's own rule is that the last one wins silently, one that is not text, and a
    value inside itself."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.deep_construct = True  # whole values at once: an alias to what it is a part of is an error then
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
        except Exception as error:  # what `!!int x`, `!!bool x` and a thirteenth month run into
            raise yaml.constructor.ConstructorError(problem=_reason(error), problem_mark=node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        seen = set()
        for key in keys:
            said = ""
            if not isinstance(key, str):
                said = f"the key {shown(key)} is not text, the name of a key needed"
            elif key in seen:
                said = f"the key {shown(key)} is given {keys.count(key)} times"
            if said:
                raise yaml.constructor.ConstructorError(problem=said, problem_mark=node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Shortened(reprlib.Repr):
    """``repr``, cut off where a sentence would become a page."""

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
    """A value as a sentence shows it: like ``repr``, but short."""
    return _SHORTENED.repr(value)


_SHORTENED = _Shortened()
