"""The starts of a run and how each of them ended, as far as its files tell."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pipeline.reports.metric_rows import is_number
from pipeline.reports.run_folder import RunFolder


@dataclass(frozen=True)
class Start:
    """One start. What no file tells is None.

    Attributes:
        number: counted from 1.
        began, ended: Unix time in seconds; ``ended`` is that of the last sign of it.
        step: done before it.
        reached: the last step that it is known to have taken.
        repeated: steps at the end of it that the next start took again.
        hosts, world_size, zero_stage, device, job: what it ran on.
        end: why it ended, in words.
        whole: whether it ended as it should: at the end of the schedule, by a signal, or not yet.
    """

    number: int
    began: float | None
    ended: float | None
    step: int | None
    reached: int | None
    repeated: int | None
    hosts: list[str]
    world_size: int | None
    zero_stage: int | None
    device: str | None
    job: str | None
    end: str
    whole: bool


def starts_of(run: RunFolder) -> list[Start]:
    """All starts, in their order."""
    events = _events_by_start(run)
    count = max([len(run.starts), *events], default=0)
    firsts = [_first_step(run, number, events) for number in range(1, count + 1)]
    return [_start(run, number, events, firsts) for number in range(1, count + 1)]


def _start(run: RunFolder, number: int, events: dict[int, list[dict[str, Any]]], firsts: list[int | None]) -> Start:
    entry = run.starts[number - 1] if number <= len(run.starts) else {}
    own = events.get(number, [])
    opened = own[0] if own else {}
    last = number == len(firsts)
    following = events.get(number + 1, [{}])[0] if not last else {}
    reached = run.step if last else _whole(following.get("reached"))
    if reached is None:
        reached = max([row["step"] for row in own if is_number(row.get("step"))], default=None)
    next_first = None if last else firsts[number]
    repeated = max(0, reached - next_first) if reached is not None and next_first is not None else None
    end, whole = _end(run, own, last, _time_of(entry.get("started")), following)
    times = [row["time"] for row in own if is_number(row.get("time"))]
    if last:
        times += [float(each[-1]) for each in [run.curve("time")[1]] if len(each)]
        times += [row["time"] for row in run.metrics.evaluations[-1:] if is_number(row.get("time"))]
    slurm = entry.get("slurm")
    return Start(
        number=number,
        began=_time_of(entry.get("started")) or opened.get("time"),
        ended=max(times, default=None),
        step=firsts[number - 1],
        reached=reached,
        repeated=repeated,
        hosts=[str(host) for host in entry.get("hosts", [])] if isinstance(entry.get("hosts"), list) else [],
        world_size=_whole(entry.get("world_size")) or _whole(opened.get("world_size")),
        zero_stage=_whole(opened.get("zero_stage")),
        device=entry.get("device") if isinstance(entry.get("device"), str) else None,
        job=_job(slurm) if isinstance(slurm, dict) else None,
        end=end,
        whole=whole,
    )


def _events_by_start(run: RunFolder) -> dict[int, list[dict[str, Any]]]:
    """Start -> its rows of events.jsonl, its own first."""
    found: dict[int, list[dict[str, Any]]] = {}
    current = 0
    for row in run.events:
        if row.get("event") == "start":
            number = _whole(row.get("number"))
            current = number if number and 0 < number <= max(len(run.starts), len(run.events)) else current + 1
            found[current] = [row]
        elif current:
            found[current].append(row)
    return found


def _first_step(run: RunFolder, number: int, events: dict[int, list[dict[str, Any]]]) -> int | None:
    """The steps done before a start."""
    told = _whole(events.get(number, [{}])[0].get("step"))
    if told is None and number <= len(run.starts):
        first = _whole(run.starts[number - 1].get("first_step"))
        told = None if first is None else max(0, first - 1)
    return told


def _end(
    run: RunFolder, own: list[dict[str, Any]], last: bool, began: float | None, following: dict[str, Any]
) -> tuple[str, bool]:
    if last and run.running:
        return "is running", True
    ends = [row for row in own if row.get("event") == "end" and isinstance(row.get("reason"), str)]
    if ends:
        reason = ends[-1]["reason"]
        return reason, ends[-1].get("whole") is True or reason.startswith("stopped by")
    until = following.get("time") if is_number(following.get("time")) else None
    requeued = [each for each in run.restarts if _between(_time_of(each.get("time")), began, until)]
    if requeued:
        return f"the job was restarted: {_exit_words(requeued[-1].get('exit_code'))}", False
    if own:
        return "ended without a word: killed, or its machine failed", False
    if last and run.finished:
        return "the end of the schedule", True
    if last and not run.holder:
        return "stopped by a signal", True
    return ("ended without a word: killed, or its machine failed" if last else "not recorded"), not last


def _exit_words(code: Any) -> str:
    known = {75: "stopped by a signal", 76: "a process was lost", 137: "a process was killed (SIGKILL)"}
    return f"{known[code]} (exit code {code})" if code in known else f"exit code {code}"


def _between(moment: float | None, began: float | None, until: float | None) -> bool:
    return moment is not None and (began is None or moment >= began) and (until is None or moment <= until)


def _time_of(text: Any) -> float | None:
    """Unix time of what ``environment.json`` and ``restarts.json`` have, such as 2026-11-22T15:42:47+0000."""
    for pattern in ("%Y-%m-%dT%H:%M:%S%z", "%Y-%m-%dT%H:%M:%S"):
        try:
            return datetime.strptime(text, pattern).timestamp()
        except (ValueError, TypeError, OverflowError):
            continue
    return None


def _job(slurm: dict[str, Any]) -> str | None:
    job = slurm.get("job", slurm.get("SLURM_JOB_ID"))
    return str(job) if job else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53 else None


def clock(moment: float | None) -> str:
    """A time of day with its date, where this runs."""
    try:
        return "?" if moment is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
    except (OverflowError, ValueError, OSError):
        return "?"


def duration(seconds: float) -> str:
    """A duration in words: ``3 d 4 h``, ``2 h 5 min``, ``4 min 12 s``, ``12 s``."""
    whole = round(max(0.0, seconds))
    days, hours, minutes, rest = whole // 86400, whole // 3600 % 24, whole // 60 % 60, whole % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
