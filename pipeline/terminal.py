"""Write for a terminal: lines that fit its width, a few colours, and what goes on while nothing else is said.

A file or a pipe gets the same words on whole lines, without colours and without bars.
"""

import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

SILENCE = 5.0  # seconds without a word after which a file gets a line
_COLOURS = {"red": "31", "green": "32", "yellow": "33"}
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_NARROWEST = 40  # columns; below, the terminal itself wraps


def width(stream: TextIO) -> int | None:
    """Columns of the terminal that a stream writes to; None for a file or a pipe."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError, AttributeError):  # no terminal, closed, or not a file
        return None


def has_colours(stream: TextIO) -> bool:
    """Whether to colour what a stream gets: a terminal that can, unless NO_COLOR is set (no-color.org); FORCE_COLOR overrules."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or width(stream) is not None and os.environ.get("TERM") != "dumb"


def paint(text: str, colour: str, stream: TextIO) -> str:
    """Text in ``red``, ``green`` or ``yellow`` where the stream :func:`has_colours`."""
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if has_colours(stream) else text


def fitted(text: str, stream: TextIO) -> str:
    """Wrap the lines that are wider than the stream's terminal, at spaces; continued lines begin where a table's text does."""
    columns = width(stream)
    if columns is None or columns < _NARROWEST:
        return text
    return "\n".join(part for line in text.split("\n") for part in _wrapped(line, columns))


def _wrapped(line: str, columns: int) -> Iterator[str]:
    if _visible(line) <= columns:
        yield line
        return
    label = re.match(r"\s*(\d\d:\d\d:\d\d |\S+(?: \S+)*  +)?", line)
    assert label  # may be empty
    margin = _visible(label[0]) if _visible(label[0]) <= columns // 2 else len(line) - len(line.lstrip())
    held, begun = label[0], False
    for word in line[len(label[0]) :].split(" "):
        if begun and _visible(held) + 1 + _visible(word) > columns:
            yield held.rstrip()
            held, begun = " " * margin, False
        held += (" " if begun else "") + word
        begun = True
    yield held.rstrip()


def _visible(text: str) -> int:
    return len(_ESCAPE.sub("", text))


def shortened(parts: Sequence[str], least: Sequence[str], stream: TextIO) -> str:
    """Join parts of a line, which will be :func:`stamped`; on a terminal without as many of ``least``, the first first, as it takes."""
    kept, columns = [part for part in parts if part], width(stream)
    for part in least:
        if columns and _visible(stamped(" ".join(kept), stream)) > columns and part in kept:
            kept.remove(part)
    return " ".join(kept)


def stamped(text: str, stream: TextIO, when: float | None = None) -> str:
    """A line with its time, and in a file its date."""
    form = "%Y-%m-%d %H:%M:%S" if width(stream) is None else "%H:%M:%S"
    return f"{time.strftime(form, time.localtime(when))} {text}"


def duration(seconds: float) -> str:
    """For people, in at most two units: ``40 s``, ``5 min``, ``1 h 12 min``, ``2 d 3 h``."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(minutes / 60)
    return f"{hours // 24} d {hours % 24} h"


class Stage:
    """A context in which something takes a while: on a terminal a line on stderr counts its seconds until it ends, in a file there
    is one every 5 s, unless PERVIT_QUIET is set. ``shown=False`` is for all processes but the first."""

    def __init__(self, what: str, shown: bool = True) -> None:
        self._what, self._shown, self._over = what, shown, threading.Event()

    def __enter__(self) -> "Stage":
        if self._shown:
            self._thread = threading.Thread(target=self._tell, name=f"stage: {self._what}", daemon=True)
            self._began = time.monotonic()
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._shown:
            self._thread.join()

    def position(self) -> str:
        """How far it is, in words: here, for how long."""
        return f"{time.monotonic() - self._began:.0f} s"

    def _tell(self) -> None:
        from tqdm import tqdm

        stream = sys.stderr
        if width(stream) is None:
            while not self._over.wait(SILENCE) and not os.environ.get("PERVIT_QUIET"):
                print(stamped(f"{self._what}: {self.position()}", stream), file=stream, flush=True)
        elif not self._over.wait(1):  # what is shorter does not flicker
            with tqdm(desc=self._what, bar_format="{desc}: {elapsed}", leave=False, dynamic_ncols=True, file=stream) as line:
                while not self._over.wait(1):
                    line.refresh()


class Progress(Stage):
    """``range(total)``, shown: a bar on a terminal, and in a file a line every 5 s."""

    def __init__(self, total: int, what: str, unit: str, shown: bool = True) -> None:
        self._total, self._unit, self._done = total, unit, 0
        self._bar = shown and width(sys.stderr) is not None
        super().__init__(what, shown and not self._bar)

    def position(self) -> str:
        spent = time.monotonic() - self._began
        left = f", {duration(spent * (self._total / self._done - 1))} left" if self._done else ""
        return f"{self._done} of {self._total} {self._unit}{left}"

    def __iter__(self) -> Iterator[int]:
        if self._bar:
            from tqdm import tqdm

            options: dict[str, Any] = {"unit": self._unit.removesuffix("es"), "leave": False, "dynamic_ncols": True}
            yield from tqdm(range(self._total), desc=self._what, **options)
            return
        with self:
            for done in range(self._total):
                self._done = done
                yield done
