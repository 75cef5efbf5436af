"""Small files of a run folder, read as far as they can be: what cannot is told in a sentence."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import struct
from pathlib import Path
from typing import Any

_LARGEST_FILE = 64 << 20  # bytes of a file that is read as a whole: none of these comes near it


def read_entries(path: Path, problems: list[str], lost: str) -> list[dict[str, Any]]:
    """The objects of a JSON list; what else it holds is left out. ``lost`` is empty for a file that need not be there."""
    text = read_text(path, problems, lost)
    if not text:
        return []
    try:
        entries = json.loads(text)
        if not isinstance(entries, list):
            raise ValueError("it holds no list")
    except (ValueError, RecursionError) as error:
        problems.append(f"{path.name} is damaged ({one_line(error)})" + (f": {lost}." if lost else "."))
        return []
    return [entry for entry in entries if isinstance(entry, dict)]


def read_rows(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines, which need not be there."""
    found, damaged = [], 0
    for line in read_text(path, problems, "").splitlines():
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError
            found.append(row)
        except (ValueError, RecursionError):
            damaged += 1
    if damaged:
        problems.append(f"{damaged:,} line{'s' * (damaged != 1)} of {path.name} cannot be read and are left out.")
    return found


def read_text(path: Path, problems: list[str], lost: str) -> str:
    """A file's text; empty if it cannot be read, which ``problems`` tells unless ``lost`` is empty and there is no file."""
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        if lost:
            problems.append(f"{path.name} is missing: {lost}.")
    except OSError as error:
        problems.append(f"{path.name} cannot be read ({error.strerror})" + (f": {lost}." if lost else "."))
    return ""


def read_lock(path: Path) -> tuple[dict[str, Any], bool]:
    """What the lock file says, and whether a process holds the lock, which this asks without taking it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return {}, False
    try:
        asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        answer = struct.unpack("hhqqi4x", fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
        running = answer[0] != fcntl.F_UNLCK
        holder = json.loads(os.read(descriptor, 4096) or b"{}")
    except (OSError, ValueError, RecursionError):
        return {}, False
    finally:
        os.close(descriptor)
    return (holder if isinstance(holder, dict) else {}), running


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:120]
