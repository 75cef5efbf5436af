"""The rows of a record as Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.gpu.cases import TITLES
from benchmarks.gpu.common import Values

_REASONS = ("skipped", "failed", "note", "profiler")
# In the name of the case, or too long for a table.
_HIDDEN = {*_REASONS, *"stage case model micro_batch compile zero_stage world_size source changed recipe decode file".split()}
_HIDDEN |= set("width heads head_dim form kernels gpu software log".split())
_SHARES = ("mfu", "data_wait", "beyond_2_levels")


def tables(record: Mapping[str, Any]) -> str:
    """All rows as Markdown, a table for each stage."""
    by_stage: dict[str, list[Values]] = {stage: [] for stage in TITLES}
    for row in record["rows"]:
        by_stage[row["stage"]].append(row)
    return "\n\n".join(f"**{TITLES[stage]}**\n\n{table(rows)}" for stage, rows in by_stage.items() if rows) + "\n"


def table(rows: list[Values]) -> str:
    """A table of one stage with a column for each figure that one of its rows has; reasons are in the first one."""
    columns = list(dict.fromkeys(name for row in rows for name in row if name not in _HIDDEN)) or ["result"]
    lines = header(["", *(column.replace("_", " ") for column in columns)])
    for row in rows:
        cells = [shown(name, row[name]) if name in row else "" for name in columns]
        cells[0] = f"{cells[0]} {why(row)}".strip()
        lines.append(line([row["case"], *cells]))
    return "\n".join(lines)


def why(row: Values) -> str:
    """What a row has instead of figures, or to say about them."""
    return "; ".join(f"{name}: {row[name]}" for name in _REASONS if name in row)


def in_a_line(row: Values) -> str:
    """A row as it is printed when it is there."""
    figures = [f"{name.replace('_', ' ')} {shown(name, value)}" for name, value in row.items() if name not in _HIDDEN]
    return f"{row['stage']}: {row['case']}: {', '.join([*figures, *filter(None, [why(row)])])}"


def shown(name: str, value: Any) -> str:
    """Three significant digits, and no fewer than all before the point."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.1%}" if name in _SHARES else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def header(titles: Iterable[str]) -> list[str]:
    titles = list(titles)
    return [line(titles), "|---" * len(titles) + "|"]


def line(cells: Iterable[str]) -> str:
    """Cells cannot hold a line break or a bar."""
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"
