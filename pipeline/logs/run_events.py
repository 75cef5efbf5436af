"""Write ``RUN/events.jsonl``: what happened to a run beside its steps. Rank 0 writes it.

::

    {"event": "start", "time": ..., "step": 40, "number": 2, "last_step": 500, "world_size": 8, "zero_stage": 1, "reached": 47}
    {"event": "evaluation", "time": ..., "step": 50, "seconds": 12.1}
    {"event": "save", "time": ..., "step": 50, "seconds": 0.4, "reason": "checkpoint.every_steps"}
    {"event": "end", "time": ..., "step": 61, "reason": "stopped by SIGTERM", "whole": false}

``step`` is the number of steps done, ``time`` the Unix time in seconds, ``number`` counts the starts. ``reached`` is the last step
in the log of the start before: those after ``step`` are repeated. ``whole`` tells the end of the schedule. A start that was killed
has no end. Whoever shows the run reads it (:mod:`pipeline.runs`); a run goes on if it cannot be written.
"""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from pipeline.cluster.world import World
from pipeline.runs import EVENTS, METRICS
from pipeline.runs.rows import last_rows

_log = logging.getLogger(__name__)


class RunEvents:
    """Appends to ``events.jsonl``; on ranks other than 0 it does nothing.

    Every row is one ``write`` to a file that is opened for it, so any thread may add one, and a kill loses none.
    """

    def __init__(self, run_dir: Path, world: World) -> None:
        self._run_dir, self._writes = run_dir, world.is_main

    def start(self, step: int, **facts: Any) -> None:
        """Add a start; call it before the log is opened, which removes the rows of steps that are repeated."""
        if self._writes:
            rows = last_rows(self._run_dir / METRICS)
            self.add("start", step, **facts, reached=rows[-1]["step"] if rows else None)

    def add(self, event: str, step: int, **facts: Any) -> None:
        """Add a row."""
        if not self._writes:
            return
        row = json.dumps({"event": event, "time": round(time.time(), 3), "step": step, **facts}) + "\n"
        try:
            descriptor = os.open(self._run_dir / EVENTS, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            try:
                size = os.fstat(descriptor).st_size
                torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"  # a row that a full disk has cut
                os.write(descriptor, ("\n" * torn + row).encode())
            finally:
                os.close(descriptor)
        except OSError as error:
            self._writes = False
            _log.warning(
                f"{self._run_dir / EVENTS} cannot be written ({error.strerror}): a report will lack this start's story"
            )
