"""Read what is new, note it, send it, in a loop. Whatever fails is tried again; the training knows nothing of it."""

import hashlib
import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pipeline.errors import UserError, first_line
from pipeline.runs import CONFIG, ENVIRONMENT, METRICS, TENSORBOARD
from pipeline.runs import EVENTS as EVENTS_FILE
from pipeline.runs.files import RunFiles
from pipeline.runs.pictures import PictureFiles
from pipeline.runs.state import state_of
from pipeline.track.position import EVENTS, PICTURE, ROWS, GrowingRows, Position
from pipeline.track.tracker import About, Item, Picture, Tracker, event_values, points, row_values

_log = logging.getLogger(__name__)
_MOST = 500  # rows, and events, in one call
_MOST_PICTURES = 10  # likewise: some are 100 kB
_LONGEST_PAUSE = 300.0  # seconds between two attempts
_ATTEMPTS = 3  # with --once


class TrackedRun(RunFiles):
    """A run folder with the rows and pictures that are to be sent. It need not exist yet."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.metrics, self.event_rows = GrowingRows(path / METRICS), GrowingRows(path / EVENTS_FILE)
        self.pictures = PictureFiles(path / TENSORBOARD)

    @property
    def has_begun(self) -> bool:
        """Whether there is a run to tell of."""
        return (self.path / CONFIG).is_file() and (self.path / METRICS).is_file()

    @property
    def identity(self) -> str:
        """Tells two runs apart that had the folder one after the other: its first start."""
        first = self.starts[:1]
        return hashlib.sha256(json.dumps(first, sort_keys=True).encode()).hexdigest()[:12] if first else ""

    def about(self, name: str) -> About:
        """What the run is; files that are sent whole are read anew."""
        texts = {}
        for file in (CONFIG, ENVIRONMENT, EVENTS_FILE):
            with suppress(OSError):
                texts[file] = (self.path / file).read_text(errors="replace")
        return About(name, self.config, self.starts[-1] if self.starts else {}, texts)


class Sender:
    """Sends the run of a folder, which need not exist yet, by a name to a tracker that is not open yet, from the position of what was
    sent before. ``every``: seconds between two looks at the run's files."""

    def __init__(
        self,
        run: Path,
        name: str,
        tracker: Tracker,
        position: Position,
        every: float,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.files, self.position = TrackedRun(run), position
        self._name, self._tracker, self._every, self._sleep = name, tracker, every, sleep
        self._open, self._checked = False, False
        self._described: tuple[object, ...] = ()
        self.sending = False  # whether items are on their way, which a signal should not cut off
        self.stopping = False  # set by a signal: end when they have arrived

    def run(self, once: bool = False) -> None:
        """Send until the run is finished; with ``once``, what is there now. Raises UserError: the tracker or the position file
        refuses; with ``once`` also if the tracker was not reached."""
        failures, complete = 0, False
        try:
            while True:
                if once and not self.files.has_begun:
                    raise UserError(f"{self.files.path} has no run yet", "leave --once away to wait for it")
                if not self.files.has_begun:
                    _log.info(f"waits for a run in {self.files.path}")
                while not self.files.has_begun:
                    self._sleep(self._every)
                try:
                    more = self.round()
                except UserError:
                    raise
                except Exception as error:  # of the tracker's client, which may raise anything; or of the run's file system
                    failures += 1
                    self._fail(error, failures, once)
                    continue
                failures = 0
                if more:
                    continue
                finished = state_of(self.files).finished
                if complete or once:
                    if reason := self._end("complete" if finished else "stopped"):
                        problem = f"{self._tracker.target} may lack what was sent last ({reason})"
                        raise UserError(problem, "the same command asks what has arrived, and sends the rest")
                    return
                complete = finished  # then one more look, which sees all
                if not complete:
                    self._sleep(self._every)
        except BaseException:
            self._end("stopped")
            raise

    def round(self) -> bool:
        """Send what is new, at most a few hundred items of each kind. Returns whether there may be more. Raises UserError:
        the tracker or the position file refuses; Exception: of the tracker's client."""
        self.files.look()
        self._check()
        if not self._open:  # go on behind what has arrived there
            position, about = self.position, self.files.about(self._name)
            arrived = self._tracker.open(position.segment, about, position.sent)
            self._open, self._described = True, self.files.stamps
            if arrived < position.sent:
                _log.info(f"{position.sent - arrived:,} items have not arrived before, and are sent again")
                position.cut(arrived)
            self._go_on()
        if self._described != (state := self.files.stamps):
            self._tracker.describe(self.files.about(self._name))
            self._described = state
        first = self.position.sent
        items = self._next_items()
        if not items:
            return False
        self.sending = True
        try:
            if self.files.metrics.row >= self.position.mark.rows:  # not while rows are sent once more
                self.position.mark = self.files.metrics.mark
            self.position.save()  # before they are sent
            self._tracker.send(first, items)
        finally:
            self.sending = False
        if self.stopping:
            raise KeyboardInterrupt
        return True

    def _next_items(self) -> list[Item]:
        """Take new items, and note them."""
        rows, events = self.files.metrics.take(_MOST), self.files.event_rows.take(_MOST)
        # A picture waits for the rows of its step: until then it may be one of those that a resume repeats.
        sent, last_step = self.position.pictures, self.files.metrics.last_step
        waiting = [found for found in self.files.pictures.look() if found.step <= last_step and found.key not in sent]
        pictures = []
        for found in waiting[:_MOST_PICTURES]:
            with suppress(OSError, ValueError):  # its file is gone
                pictures.append(Picture(found.name, found.step, found.time, found.key, found.png()))
        items: list[Item] = [*points(rows, row_values), *points(events, event_values), *pictures]
        self.position.note(ROWS, len(rows))
        self.position.note(EVENTS, len(events))
        for picture in pictures:
            self.position.note(PICTURE, picture.key)
        return items

    def _check(self) -> None:
        """Begin a new segment if what was sent does not begin ``metrics.jsonl`` any more."""
        metrics, events, position = self.files.metrics, self.files.event_rows, self.position
        if events.was_replaced():
            events.go_to(position.count(EVENTS))
        if self._checked and not metrics.was_replaced():
            return
        identity = self.files.identity
        if position.identity and identity and position.identity != identity:
            _log.info("the folder has another run than before, which is sent as a run of its own")
            self._end("superseded")
            position.begin(identity)
        elif not metrics.begins_with(position.mark):
            self._end("superseded")
            position.rewind()
            _log.info(f"a resume has rewound the run: it is sent again, as segment {position.segment.number}")
        position.identity = position.identity or identity
        self._go_on()
        self._checked = True

    def _go_on(self) -> None:
        """Note where the tracker stands, and read from there."""
        self.position.save()
        self.files.metrics.go_to(self.position.count(ROWS))
        self.files.event_rows.go_to(self.position.count(EVENTS))

    def _end(self, state: str) -> str:
        """End the connection; returns why the tracker could not be told, if so."""
        if self._open:
            self._open = False
            try:
                self._tracker.close(state)
            except Exception as error:
                if state != "lost":
                    _log.warning(f"{self._tracker.target} could not be told the end ({_reason(error)})")
                return _reason(error)
        return ""

    def _fail(self, error: Exception, failures: int, once: bool) -> None:
        """Wait, then let the next round connect again."""
        self._end("lost")
        if once and failures >= _ATTEMPTS:
            problem = f"{self._tracker.target} could not be reached ({_reason(error)})"
            raise UserError(problem, "the same command continues with what is left to send") from None
        pause = min(self._every * 2 ** (failures - 1), _LONGEST_PAUSE)
        _log.warning(f"{self._tracker.target}: {_reason(error)}; the next attempt is in {pause:g} s")
        self._sleep(pause)


def _reason(error: Exception) -> str:
    return first_line(error)[:200]
