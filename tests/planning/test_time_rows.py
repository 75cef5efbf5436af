"""Numbers on the page of a plan."""

from __future__ import annotations

import pytest

from pipeline.errors import size_text


@pytest.mark.parametrize(
    ("count", "text"),
    [(999.4e6, "999 MB"), (999.6e6, "1 GB"), (525e6, "525 MB"), (1.574e9, "1.57 GB"), (999.7e3, "1 MB"), (12, "12 B")],
)
def test_sizes_are_in_a_unit_that_fits(count: float, text: str) -> None:
    """Guards against "1e+03 MB"."""
    assert size_text(count) == text
