"""The loader benchmark's report: tables, goals, JSON."""

from __future__ import annotations

import json
import platform
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """A contestant and its figures, one value per round."""

    name: str
    what: str
    reference: str  # name of the row whose CPU time is 1
    limit: str  # name of the row that is the limit on the same stored images
    skipped: str | None  # why there are no figures
    images_per_s: list[float]
    cpu_ms: list[float]  # per image


@dataclass(frozen=True)
class Goal:
    """Median CPU time of ``ours`` is at most ``at_most`` times that of ``other``."""

    what: str
    ours: str
    other: str
    at_most: float


@dataclass(frozen=True)
class Outcome:
    """A goal beside what was measured."""

    goal: Goal
    ratio: float | None  # None: one of the two was not measured

    @property
    def verdict(self) -> str:
        if self.ratio is None:
            return "not measured"
        return "PASS" if self.ratio <= self.goal.at_most else "FAIL"


def ratio(rows: list[Row], name: str, other: str) -> float | None:
    """Median CPU time of one row over another's; None where one is missing."""
    medians = {row.name: statistics.median(row.cpu_ms) for row in rows if row.cpu_ms}
    return medians[name] / medians[other] if name in medians and other in medians else None


def outcomes(rows: list[Row], goals: list[Goal]) -> list[Outcome]:
    """Every goal, measured or not."""
    return [Outcome(goal, ratio(rows, goal.ours, goal.other)) for goal in goals]


def print_report(rows: list[Row], goals: list[Goal], settings: str) -> None:
    """Print Markdown: a table for crop-flip, one for the full recipe, the contestants left out, the goals."""
    print(f"\n{settings}; medians (least - most) of the rounds; ratios are of CPU time")
    for reference, title in (("ours", "Crop and flip"), ("ours_full", "Full recipe")):
        measured = [row for row in rows if row.reference == reference and row.cpu_ms]
        if not measured:
            continue
        print(f"\n{title}:\n")
        print(
            "| contestant | | images/s | CPU ms per image | to ours | to the limit on the same JPEGs |\n|---|---|---|---|---|---|"
        )
        for row in measured:
            speeds, times = _spread(row.images_per_s, ".0f"), _spread(row.cpu_ms, ".2f")
            to_ours, to_limit = (_times(ratio(rows, row.name, other)) for other in (row.reference, row.limit))
            print(f"| `{row.name}` | {row.what} | {speeds} | {times} | {to_ours} | {to_limit} |")
    print()
    for row in rows:
        if row.skipped:
            print(f"{row.name}: skipped: {row.skipped}")
    print("\nGoals, CPU time:\n")
    for outcome in outcomes(rows, goals):
        found = _times(outcome.ratio)
        print(f"- {outcome.goal.what}: {found}, must be at most {outcome.goal.at_most:.2f}: {outcome.verdict}")


def print_parts(parts: dict[str, dict[str, float]], rows: list[Row]) -> None:
    """Print the parts of our loader, a column per form of it: CPU milliseconds per image, and their ratio to the limit.

    Args:
        parts: contestant -> part -> CPU milliseconds per image.
        rows: of the report; they have the limits and the whole.
    """
    limits = {row.name: row.limit for row in rows}
    medians = {row.name: statistics.median(row.cpu_ms) for row in rows if row.cpu_ms}
    shown = {name: {**of, "the whole loader": medians[name]} for name, of in parts.items() if name in medians}
    print("\nParts, CPU ms per image (ratio to the limit):\n")
    print(f"| part | {' | '.join(f'`{name}`' for name in shown)} |\n|---|{'---|' * len(shown)}")
    for part in dict.fromkeys(part for of in shown.values() for part in of):
        cells = [_part(of.get(part), medians.get(limits[name])) for name, of in shown.items()]
        print(f"| {part} | {' | '.join(cells)} |")


def _part(milliseconds: float | None, limit: float | None) -> str:
    if milliseconds is None:
        return "-"
    return f"{milliseconds:.3f}" + (f" ({milliseconds / limit:.2f})" if limit else "")


def write_json(path: Path, rows: list[Row], goals: list[Goal], settings: str) -> None:
    """Write the figures of every turn and the outcomes as JSON."""
    tree = {
        "settings": settings,
        "machine": {"processor": _processor(), "python": platform.python_version()},
        "contestants": [asdict(row) for row in rows],
        "goals": [{**asdict(o.goal), "ratio": o.ratio, "verdict": o.verdict} for o in outcomes(rows, goals)],
    }
    path.write_text(json.dumps(tree, indent=1) + "\n")


def _spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} - {max(values):{form}})"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _processor() -> str:
    """The CPU model name from /proc/cpuinfo."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
