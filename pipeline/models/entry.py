"""Describe the models, without PyTorch: what a family registers for each of its sizes, and which names (``timm:NAME``) timm has.

The registry reads it, and loads the families.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import UserError, missing_extra

if TYPE_CHECKING:
    from pipeline.models.common.base import Switches, VisionModel

TIMM_PREFIX = "timm:"


@dataclass(frozen=True)
class ModelEntry:
    """A model and its paper's figures, None where the paper has none.

    Attributes:
        build: called with ``switches`` and the fields of :class:`~pipeline.models.common.base.ModelOptions`.
        description: one line for the list of models.
        paper: with the table.
        switches: the family's ablations.
        paper_params_m: millions.
        paper_gmacs: 1e9 multiply-accumulates at the paper's image size.
        paper_top1: percent, on the paper's data set.
        image_size, num_classes: that the paper's figures are for.
    """

    name: str
    build: Callable[..., VisionModel]
    description: str
    paper: str
    switches: type[Switches]
    paper_params_m: float | None = None
    paper_gmacs: float | None = None
    paper_top1: float | None = None
    image_size: int = 224
    num_classes: int = 1000


registered: dict[str, ModelEntry] = {}

Size = tuple[Any, str, float | None, float | None, float | None]


def register(
    family: Callable[..., VisionModel], switches: type[Switches], paper: str, data: tuple[int, int] = (224, 1000), **sizes: Size
) -> None:
    """Register the sizes of a family.

    Args:
        family: called with a layout and with what ``build`` of :class:`ModelEntry` is.
        switches: the family's ablations.
        paper: with the table.
        data: image size and number of classes that the paper's figures are for.
        sizes: name = (layout, one line for the list of models, the paper's parameters in millions, GMACs and top-1 in percent).
    """
    for name, (layout, description, params_m, gmacs, top1) in sizes.items():
        build = partial(family, layout)
        registered[name] = ModelEntry(name, build, description, paper, switches, params_m, gmacs, top1, *data)


def is_timm(name: str) -> bool:
    """Whether ``model.name`` is one of timm's models."""
    return name.startswith(TIMM_PREFIX)


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
