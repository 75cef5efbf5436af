"""The fault tests: processes are really killed. The quick ones run always, the soak only when it is asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.power import Disk

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out this folder's soak tests unless ``PERVIT_SOAK=1``."""
    if os.environ.get("PERVIT_SOAK") == "1":
        return
    for item in items:
        if item.path.is_relative_to(HERE) and item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.skip(reason="part of the soak: set PERVIT_SOAK=1"))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    try:
        disk = Disk(tmp_path / "disk.ext4", tmp_path / "disk", mib=64)
    except OSError as error:
        pytest.skip(f"cannot mount a file system here: {error}")
    yield disk
    disk.close()
