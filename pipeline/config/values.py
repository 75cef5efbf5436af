"""Define the types of config values with their bounds; parse YAML strictly: malformed input is a ``ValueError`` of one line."""

import math
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from pipeline.errors import UserError, shown

# Sanity bounds: far above any recipe, far below overflow or exhausted memory. A typo (an extra zero, the wrong unit) is an
# error message instead of a run that hangs.
MAX_SHAPE = 2**20  # tensor dimensions: classes, widths
MAX_SIDE = 2**12  # pixels: attention over a larger grid fits into no GPU's memory
MAX_BATCH = 2**14  # images per rank and forward pass: likewise
MAX_GLOBAL_BATCH = 2**20  # images per optimizer step; the largest published ones are below 2**17
MAX_STEPS = 10**12  # steps and event counts: times MAX_GLOBAL_BATCH it still fits into 64 bits
MAX_PROFILED = 100  # steps of one profile: a step of PerViT-M is tens of thousands of events, which wait in memory
MAX_EPOCHS = 1e6  # Philox counters have 32 bits for the epoch (pipeline.stream.philox)
MAX_SECONDS = 30 * 24 * 3600.0  # 30 days; timeouts of collectives and stores overflow long before a float does
MAX_RATE = 1e3  # learning rate, weight decay
MAX_SWITCH = 2**63 - 1  # integers that JSON and checkpoints can hold; a model's own bounds are narrower

_DEEPEST = 32  # levels of nesting: PyYAML's time is quadratic in them, and it recurses until Python's stack overflows

PositiveInt = Annotated[int, Field(ge=1, le=MAX_SHAPE)]
Steps = Annotated[int, Field(ge=1, le=MAX_STEPS)]
Window = tuple[Steps, Steps]  # first and last step
Count = Annotated[int, Field(ge=0, le=MAX_STEPS)]
BatchSize = Annotated[int, Field(ge=1, le=MAX_BATCH)]
GlobalBatchSize = Annotated[int, Field(ge=1, le=MAX_GLOBAL_BATCH)]
Epochs = Annotated[float, Field(gt=0, le=MAX_EPOCHS, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=0, le=MAX_RATE, allow_inf_nan=False)]
PositiveRate = Annotated[float, Field(gt=0, le=MAX_RATE, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Aspect = Annotated[float, Field(ge=0.01, le=100)]
Mean = Annotated[float, Field(ge=-10, le=10, allow_inf_nan=False)]  # of pixels in [0, 1]; rejects values meant for [0, 255]
Deviation = Annotated[float, Field(ge=1e-3, le=10, allow_inf_nan=False)]


def _printable(text: str) -> str:
    for character in text:
        if unicodedata.category(character) in ("Cc", "Zl", "Zp"):
            raise ValueError(f"must be printable, got the control character U+{ord(character):04X}")
    return text


Text = Annotated[str, Field(min_length=1, max_length=1024), AfterValidator(_printable)]


def _checked_plain(values: dict[str, Any]) -> dict[str, Any]:
    for name, value in values.items():
        parts = value if isinstance(value, list | tuple) else [value]
        if not all(_is_plain(part) for part in parts):
            raise ValueError(f"must have a boolean, a number, text, null or a list of these as {name!a:.80}, got {value!a:.80}")
    return values


def _is_plain(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str | bool) or (isinstance(value, int) and abs(value) <= MAX_SWITCH)


PlainValues = Annotated[dict[str, Any], AfterValidator(_checked_plain)]


class Section(BaseModel):
    """A section of the config: immutable, rejects unknown keys. A field's docstring is its description in the key table."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_booleans_for_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        # pydantic would coerce `true` to 1. Its coercion of strings is wanted: YAML 1.1 reads 5e-4 as one.
        annotation = str(cls.model_fields[str(info.field_name)].annotation)
        parts = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(part, bool) for part in parts) and "bool" not in annotation and "Any" not in annotation:
            raise ValueError("must be a number or text, not a boolean")
        return value

    @model_validator(mode="after")
    def _keys_fit_together(self) -> "Section":
        if problem := next(self.misfits(), None):
            raise ValueError(problem)
        return self

    def misfits(self) -> Iterator[str]:
        """Sentences about values that are right each by itself, but do not go together."""
        yield from ()


def parse_value(text: str) -> Any:
    """Parse a YAML document into plain Python: dictionaries, lists, strings, numbers, booleans, dates, None. Raises ValueError:
    invalid YAML; the message is one line that fits "... is not a YAML value (MESSAGE)"."""
    return _parse(text, _StrictLoader)


def parse_text(text: str) -> Any:
    """:func:`parse_value` with every value as the text that stands there: 77.40 stays 77.40."""
    return _parse(text, _TextLoader)


def _parse(text: str, loader: "type[_StrictLoader]") -> Any:
    try:
        return yaml.load(text, Loader=loader)
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
    """The values of ``--switch`` by name, from changes ``name=value``, the value in YAML. Raises UserError: one is not of that form."""
    switches: dict[str, Any] = {}
    for change in changes:
        name, equals, value = change.partition("=")
        try:
            if not equals or not name:
                raise ValueError("a name or the = is missing")
            switches[name] = parse_value(value)
        except ValueError as error:
            problem = f"--switch {shown(change)} is not of the form name=value ({error})"
            raise UserError(problem, "write for example mask_content_layers=10") from None
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
        problems = [f"{shown(key)} is not a string" for key in keys if not isinstance(key, str)]
        problems = problems or [f"{shown(key)} is given {times} times" for key, times in Counter(keys).items() if times > 1]
        if problems:
            raise yaml.constructor.ConstructorError(problem=f"the key {problems[0]}", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


class _TextLoader(_StrictLoader):
    """Takes no value for a number, a date or a truth value."""

    yaml_implicit_resolvers: dict = {}
