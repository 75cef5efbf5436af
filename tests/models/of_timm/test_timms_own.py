"""timm's own tests of models, run on ours: those of ``tests/test_models.py`` in the source distribution of the installed version,
whose folder ``PERVIT_TIMM_SOURCE`` names (``pip download --no-binary timm --no-deps timm==VERSION``, unpacked)."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
from pathlib import Path
from types import ModuleType

import pytest

timm = pytest.importorskip("timm", reason="timm (extra `timm`) is not installed")

import pipeline.models.for_timm  # noqa: E402, F401  registers our models

SOURCE = os.environ.get("PERVIT_TIMM_SOURCE")
pytestmark = pytest.mark.skipif(not SOURCE, reason="set PERVIT_TIMM_SOURCE to timm's unpacked source distribution")

MODELS = ("pervit_t", "convit_ti", "deit_t", "lsat_t_224", "posmlp_t")
MAPS = MODELS[3:]  # the others have a class token, or tokens in rows, as timm's own models of their kinds
TESTS = {
    "test_model_forward": MODELS,
    "test_model_backward": MODELS,
    "test_model_default_cfgs": MAPS,
    "test_model_default_cfgs_non_std": MODELS,
    "test_model_forward_features": MAPS,
    "test_model_forward_intermediates_features": MODELS,
    "test_model_forward_intermediates": MODELS,
}


@pytest.fixture(scope="module")
def theirs(request: pytest.FixtureRequest) -> ModuleType:
    path = Path(SOURCE or "", "tests", "test_models.py")
    for marker in set(re.findall(r"@pytest\.mark\.(\w+)", path.read_text())):
        request.config.addinivalue_line("markers", marker)
    spec = importlib.util.spec_from_file_location("tests_of_timm", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("test", "model"), [(test, model) for test, models in TESTS.items() for model in models])
def test_timms_test_passes(test: str, model: str, theirs: ModuleType) -> None:
    given = {"model_name": model, "batch_size": 2 if "backward" in test else 1, "cfg_device": "meta"}
    function = getattr(theirs, test)
    function(*(given[name] for name in inspect.signature(function).parameters))
