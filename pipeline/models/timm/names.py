"""Know timm's names, of models (``timm:NAME``) and of the files in its folders, without timm and PyTorch."""

from __future__ import annotations

import difflib
import importlib.util
import re
from functools import cache
from pathlib import Path

from pipeline.errors import UserError, missing_extra
from pipeline.models.entry import TIMM_PREFIX

CONFIG, WEIGHTS, PICKLED = "config.json", "model.safetensors", "pytorch_model.bin"


def check_timm_name(name: str) -> None:
    """See that timm has the model ``timm:NAME``, without importing timm.

    Raises:
        UserError: timm is not installed, it has no such model, or the name is of weights, a folder or a repository.
    """
    architecture = name.removeprefix(TIMM_PREFIX)
    if ":" in architecture or "/" in architecture:
        raise UserError(
            f"model.name must be a name of timm's list, got {name}, a folder or a repository",
            "write timm:NAME, and give local weights to train.init_from",
        )
    if importlib.util.find_spec("timm") is None:
        raise missing_extra(f"model.name {name}", "timm", "timm")
    known = defined_names()
    plain, dot, tag = architecture.partition(".")
    if dot and plain in known:
        raise UserError(
            f"model.name must be an architecture, got {name}, whose part {tag!r} names weights, which are never downloaded",
            f"write {TIMM_PREFIX}{plain}, and give a local file with the weights to train.init_from",
        )
    if known and architecture not in known:
        close = difflib.get_close_matches(plain, known, n=1)
        hint = f"did you mean {TIMM_PREFIX}{close[0]}?" if close else "timm.list_models() has the names"
        raise UserError(f"model.name must be a model of timm's list, got {name}", hint)


@cache
def defined_names() -> frozenset[str]:
    """Every name that timm's source files register; empty if they look otherwise than expected, when timm itself decides later."""
    spec = importlib.util.find_spec("timm")
    folders = spec.submodule_search_locations if spec else None
    files = [file for folder in folders or [] for file in Path(folder, "models").glob("*.py")]
    return frozenset(
        name
        for file in files
        for name in re.findall(r"^@register_model\s*\ndef (\w+)\(", file.read_text(encoding="utf-8"), re.MULTILINE)
    )


def is_timm_folder(path: Path) -> bool:
    """Whether a folder is meant to be of timm's layout, whole or not."""
    return path.is_dir() and any((path / name).is_file() for name in (CONFIG, WEIGHTS, PICKLED))
