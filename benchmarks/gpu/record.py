"""The record of a check: a JSON object that is complete after each row.

``{"format": 1, "gpu": {...}, "software": {...}, "commit", "date", "rows": [{"stage", "case", ...}]}``; benchmarks/gpu_ledger/README.md
has the fields.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.gpu.common import REPOSITORY, Values
from pipeline.files import replace_text

FORMAT = 1


class Record:
    """Rows with what they were measured on; written to ``path`` whenever there is a new one, if there is a path."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        when = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self.content: dict[str, Any] = {
            "format": FORMAT,
            "gpu": {},
            "software": {},
            "commit": _commit(),
            "date": when,
            "rows": [],
        }

    @property
    def rows(self) -> list[Values]:
        return self.content["rows"]

    def add(self, row: Values) -> Values:
        """Keep a row without what JSON cannot hold or others need not know; returns it."""
        row = {name: _clean(value) for name, value in row.items()}
        for part in ("gpu", "software"):
            if part in row:
                self.content[part] = row.pop(part)
        self.rows.append(row)
        if self._path:
            replace_text(self._path, json.dumps(self.content, indent=1) + "\n")
        return row


def _clean(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, str):
        for private, public in {str(REPOSITORY): ".", os.path.expanduser("~"): "~", socket.gethostname(): "HOST"}.items():
            value = value.replace(private, public) if len(private) > 1 else value
    return value


def _commit() -> str:
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip() or "not known"
    except (OSError, subprocess.TimeoutExpired):
        return "not known"
