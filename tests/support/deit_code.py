"""The authors' code of DeiT, for parity tests: ``PERVIT_DEIT_CODE`` names a clone of github.com/facebookresearch/deit."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import pytest

CODE = os.environ.get("PERVIT_DEIT_CODE")
needs_code = pytest.mark.skipif(not CODE, reason="set PERVIT_DEIT_CODE to a clone of facebookresearch/deit")


def authors_source(name: str) -> str:
    """The text of one of the authors' files."""
    shown = subprocess.run(["git", "-C", str(CODE), "show", f"HEAD:{name}.py"], capture_output=True, text=True, check=True)
    return shown.stdout


def authors_module(name: str) -> types.ModuleType:
    """A file of the authors', with the names that it imports from a former timm."""
    import timm.data.transforms as former
    import timm.models.vision_transformer as vision_transformer

    for module, missing in ((former, "_pil_interp"), (vision_transformer, "_cfg")):
        if not hasattr(module, missing):
            setattr(module, missing, lambda *_, **__: {})
    for old, new in (("timm.models.layers", "timm.layers"), ("timm.models.registry", "timm.models")):
        sys.modules.setdefault(old, __import__(new, fromlist=["x"]))
    module = types.ModuleType(f"authors_{name}")
    sys.modules[module.__name__] = module  # timm's registry looks a model's module up
    exec(compile(authors_source(name), f"{name}.py", "exec"), module.__dict__)
    return module
