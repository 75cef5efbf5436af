"""The rows as Markdown: a table for each stage, with a column for each figure that one of its rows has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.gpu.stages import BY_NAME

REASONS = ("skipped", "failed")


def markdown(rows: Iterable[Mapping[str, Any]]) -> str:
    """Tables for ``docs/results/``.

    Args:
        rows: ``{"stage", "case", "values"}`` in their order.
    """
    by_stage: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_stage.setdefault(row["stage"], []).append(row)
    return "\n\n".join(f"**{BY_NAME[name].title}**\n\n{table(found)}" for name, found in by_stage.items()) + "\n"


def table(rows: list[Mapping[str, Any]]) -> str:
    """A table of one stage: a row that has only a reason shows it in the first column of figures."""
    columns = list(dict.fromkeys(name for row in rows for name in row["values"] if name not in REASONS)) or ["result"]
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for row in rows:
        values = row["values"]
        why = "; ".join(f"{name}: {values[name]}" for name in REASONS if name in values)
        cells = [shown(values[name]) if name in values else "" for name in columns]
        if why:
            cells[0] = f"{cells[0]} {why}".strip()
        lines.append("| " + " | ".join(clean(cell) for cell in [row["case"], *cells]) + " |")
    return "\n".join(lines)


def shown(value: Any) -> str:
    """Three significant digits, and no fewer than all before the point."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def clean(cell: str) -> str:
    """A cell cannot hold a line break or a bar."""
    return " ".join(cell.split()).replace("|", "\\|")
