"""Headless Chromium: what a page becomes once its scripts have run, and what they complain about."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from support.launching import PATIENCE

NAMES = ("chromium", "chromium-browser", "google-chrome")


def open_page(page: Path, *options: str) -> tuple[str, list[str]]:
    """Open a page and let its scripts run.

    Returns:
        The document as HTML, and what the console says: errors of scripts, and what could not be loaded.
    """
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("needs Chromium (Debian: apt-get install chromium)")
    command = [
        program, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--user-data-dir={page.parent / 'profile'}",
        "--virtual-time-budget=10000", *options, "--dump-dom", page.resolve().as_uri(),
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout, [line for line in result.stderr.splitlines() if "CONSOLE" in line]
