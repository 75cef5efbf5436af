"""Define what is sent, under which names, and what a tracker must offer."""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.logs import tensorboard
from pipeline.runs.rows import Row, is_number

WHERE = "where"  # group of what makes straight lines: trackers sort groups by name, so it stands last
_ALWAYS = ("epoch", "samples")  # of every row, in that group
_NOT_VALUES = ("step", "time", "weights", "event")


@dataclass(frozen=True)
class Point:
    """A row of ``metrics.jsonl`` or ``events.jsonl``."""

    step: int  # optimizer steps done
    time: float  # Unix time in seconds
    values: dict[str, float | str]  # name -> number; of an event also text


@dataclass(frozen=True)
class Picture:
    """A picture of the run."""

    name: str  # as in TensorBoard
    step: int
    time: float
    key: str  # tells it from the run's other pictures
    png: bytes  # the encoded image

    def image(self) -> Any:
        """As Pillow has it."""
        from PIL import Image

        image = Image.open(io.BytesIO(self.png))
        image.load()
        return image


Item = Point | Picture


@dataclass(frozen=True)
class About:
    """What a run is, beside its items."""

    name: str  # what the tracker calls it
    config: dict[str, Any]  # section -> key -> value
    start: dict[str, Any]  # the newest one of ``environment.json``
    texts: dict[str, str]  # whole files, by name


@dataclass
class Segment:
    """One history in the tracker."""

    id: str  # unique, chosen here
    number: int = 1
    place: str = ""  # what the tracker needs to find it again; empty before it was opened
    earlier: tuple[str, ...] = ()  # ``place`` of the segments before

    @property
    def base(self) -> str:
        """What all segments of a run have in common."""
        return self.id.partition("-")[0]

    def title(self, name: str) -> str:
        """What the tracker calls it."""
        return name if self.number == 1 else f"{name} ({self.number})"


class Tracker(Protocol):
    """A tracker, made of the project's name; None: that of its variable, or ``pervit``. Every method may raise anything of its client's,
    after which it is closed, opened and asked what has arrived."""

    target: str  # where it sends to, in a few words

    def open(self, segment: Segment, about: About, sent: int) -> int:
        """Begin a segment or go on with it: its ``place`` may be set. Returns how many items have arrived, without a gap, of those that
        were ``sent``. Raises UserError: it can never succeed so: not logged in, no such address."""

    def send(self, first: int, items: Sequence[Item]) -> None:
        """Send items, of which the first has this number in its segment."""

    def describe(self, about: About) -> None:
        """Renew what is known of the run."""

    def close(self, state: str) -> None:
        """End the connection; ``state`` is ``complete``, ``superseded`` (a new segment follows), ``stopped`` or ``lost``."""


def row_values(row: Mapping[str, Any]) -> dict[str, float | str]:
    """Name -> value of a row of ``metrics.jsonl``, by the names of TensorBoard's curves, with what those leave out. ``null``, which stands
    for a number that was not finite, is left out: no two trackers treat it alike."""
    values: dict[str, float | str] = {f"{WHERE}/{name}": row[name] for name in _ALWAYS if is_number(row.get(name))}
    if "analysis" in row:
        return {**values, **_leaves(row["analysis"], "analysis")}
    group, suffix = ("eval", tensorboard.suffix(str(row["weights"]))) if "weights" in row else ("train", "")
    named = tensorboard.of_row({name: value for name, value in row.items() if is_number(value)}, group, suffix)
    for name, value in row.items():
        if is_number(value) and name not in (*_ALWAYS, *_NOT_VALUES) and name in tensorboard.NO_CURVES:
            named[f"{WHERE}/{group}_{name}{suffix}"] = value
    return {**values, **named}


def event_values(event: Mapping[str, Any]) -> dict[str, float | str]:
    """Name -> value of a row of ``events.jsonl``: ``events/save_seconds``."""
    kind = f"events/{event.get('event')}"
    told: dict[str, float | str] = {}
    for name, value in event.items():
        value = int(value) if isinstance(value, bool) else value
        if name not in _NOT_VALUES and (isinstance(value, str) or is_number(value)):
            told[f"{kind}_{name}"] = value
    return told or {kind: 1}


def points(rows: Sequence[Row], values: Callable[[Row], dict[str, float | str]]) -> list[Point]:
    """Rows as they are sent, with what :func:`row_values` or :func:`event_values` tells of each."""
    return [Point(row["step"], float(row["time"]), values(row)) for row in rows]


def flat(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Dotted key -> value."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found.update(flat(value, f"{above}{key}.") if isinstance(value, Mapping) and value else {f"{above}{key}": value})
    return found


def _leaves(tree: Any, name: str) -> dict[str, float]:
    if isinstance(tree, Mapping):
        return {key: value for part in tree for key, value in _leaves(tree[part], f"{name}/{part}").items()}
    if isinstance(tree, list):
        return {key: value for number, part in enumerate(tree) for key, value in _leaves(part, f"{name}/{number}").items()}
    return {name: tree} if is_number(tree) else {}
