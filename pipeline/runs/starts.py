"""Tell the starts of a run, and how each of them ended."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pipeline.errors import exit_reason
from pipeline.runs.folder import RunFolder
from pipeline.runs.rows import Row, is_count, is_number


@dataclass(frozen=True)
class Start:
    """A start, and what it ran on. What no file tells is None."""

    number: int  # counted from 1
    began: float | None  # Unix time in seconds
    ended: float | None  # of its last activity
    step: int | None  # done before it
    reached: int | None  # the last step that it is known to have taken
    repeated: int | None  # steps at the end of it that the next start took again
    hosts: list[str]
    world_size: int | None
    zero_stage: int | None
    device: str | None
    job: str | None
    end: str  # why it ended, in words
    whole: bool  # it ended as it should: at the end of the schedule, by a signal, or not yet


def starts_of(run: RunFolder) -> list[Start]:
    """All starts, in their order."""
    events: list[list[Row]] = []  # of each start, its own first
    for row in run.events:
        if row.get("event") == "start":
            events.append([row])
        elif events:
            events[-1].append(row)
    count = max(len(run.starts), len(events))
    events += [[]] * (count - len(events))
    entries = run.starts + [{}] * (count - len(run.starts))
    return [_start(run, number, entries, events) for number in range(count)]


def _start(run: RunFolder, number: int, entries: list[dict[str, Any]], events: list[list[Row]]) -> Start:
    entry, own, last = entries[number], events[number], number == len(events) - 1
    opened = own[0] if own else {}
    following = {} if last or not events[number + 1] else events[number + 1][0]
    reached = run.state.step if last else following.get("reached")
    if not is_count(reached):
        reached = max((row["step"] for row in own), default=None)
    times = [row["time"] for row in own if is_number(row.get("time"))]
    if last:
        times += run.curve("time")[1][-1:].tolist()
        times += [row["time"] for row in run.metrics.evaluations[-1:] if is_number(row.get("time"))]
    began = _time_of(entry.get("started")) or opened.get("time")
    end, whole = _end(run, own, last, began, following.get("time"))
    hosts, slurm = entry.get("hosts"), entry.get("slurm")
    return Start(
        number=number + 1,
        began=began,
        ended=max(times, default=None),
        step=opened.get("step"),
        reached=reached,
        repeated=max(0, reached - following["step"]) if reached is not None and following else None,
        hosts=[str(host) for host in hosts] if isinstance(hosts, list) else [],
        world_size=_count(entry.get("world_size")) or _count(opened.get("world_size")),
        zero_stage=_count(opened.get("zero_stage")),
        device=entry.get("device") if isinstance(entry.get("device"), str) else None,
        job=str(slurm["job"]) if isinstance(slurm, dict) and slurm.get("job") else None,
        end=end,
        whole=whole,
    )


def _end(run: RunFolder, own: list[Row], last: bool, began: float | None, until: Any) -> tuple[str, bool]:
    """Why a start ended, and whether as it should."""
    if last and run.state.alive:
        return "is running", True
    for row in reversed(own):
        if row.get("event") == "end" and isinstance(row.get("reason"), str):
            return row["reason"], row.get("whole") is True or row["reason"].startswith("stopped by")
    for entry in reversed(run.restarts):
        when, code = _time_of(entry.get("time")), entry.get("exit_code")
        if when is not None and (began or 0) <= when and (not is_number(until) or when <= until):
            why = exit_reason(code) if is_count(code) else "a process failed"
            return f"the job was restarted: {why} (exit code {code})", False
    return "ended without a word: killed, or its machine failed" if own else "not recorded", not own


def _time_of(text: Any) -> float | None:
    """Unix time of what ``environment.json`` and ``restarts.json`` have, such as 2026-11-22T15:42:47+0000."""
    for pattern in ("%Y-%m-%dT%H:%M:%S%z", "%Y-%m-%dT%H:%M:%S"):
        try:
            return datetime.strptime(text, pattern).timestamp()
        except (ValueError, TypeError, OverflowError):
            continue
    return None


def _count(value: Any) -> int | None:
    return value if is_count(value) else None
