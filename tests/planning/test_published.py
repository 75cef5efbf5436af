"""Plans of steps that others have published: the table is that of this plan."""

from __future__ import annotations

import csv
from collections.abc import Callable

import pytest

from benchmarks.plan_time import PUBLISHED, planned_seconds

Row = dict[str, str]


def rows(chosen: Callable[[Row], bool]) -> list[Row]:
    with PUBLISHED.open() as file:
        return [row for row in csv.DictReader(file) if chosen(row)]


@pytest.mark.parametrize(
    "row", rows(lambda row: row["model"] == "deit_t"), ids=lambda row: f"{row['gpu']} {row['step']} {row['form']}"
)
def test_the_table_is_up_to_date(row: Row) -> None:
    """Guards against rates that were changed without a look at what they were fitted to."""
    planned = 1e3 * planned_seconds(row)
    assert planned == pytest.approx(float(row["planned_ms"]), rel=0.01), "python -m benchmarks.plan_time --published"
    assert 100 * (planned / float(row["measured_ms"]) - 1) == pytest.approx(float(row["error_percent"]), abs=1.5)


def test_each_step_has_its_source() -> None:
    """Guards against figures of nowhere."""
    every = rows(lambda row: True)
    assert len(every) == 48 and all(row["source"] and float(row["measured_ms"]) > 0 for row in every)
