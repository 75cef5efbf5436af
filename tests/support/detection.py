"""Whether a detector can be built here."""

from __future__ import annotations

import importlib.util

import pytest

from pipeline.errors import install_extra


def needs_torchvision() -> None:
    """Skip the test where torchvision's operators do not load beside this PyTorch, or pycocotools is missing."""
    from examples.detection.model import import_torchvision
    from pipeline.errors import UserError

    try:
        import_torchvision()
    except UserError as error:
        pytest.skip(str(error))
    if importlib.util.find_spec("pycocotools") is None:
        pytest.skip(f"there is no package 'pycocotools': {install_extra('detection')}")
