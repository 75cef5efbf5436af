"""Names of the models, who published them, and how to build one. The names are known without PyTorch."""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pipeline.config import section_from_dict
from pipeline.errors import UserError

if TYPE_CHECKING:
    from torch import nn

    from pipeline.models.base import Switches


@dataclass(frozen=True)
class ModelEntry:
    """A registered model and what its paper says of it."""

    name: str
    build: Callable[..., nn.Module]
    description: str
    paper: str  # with the table
    paper_params_m: float | None  # millions; None, here and below: the paper does not say
    paper_gmacs: float | None  # 1e9 multiply-accumulates at the paper's image size
    paper_top1: float | None  # percent, on the paper's data set
    switches: type[Switches]  # the family's ablations
    image_size: int = 224  # that the paper's figures are for
    num_classes: int = 1000


_FAMILIES = ("convit", "deit", "gmlp", "lsat", "pervit", "posmlp")  # modules beside this one; each registers its models
_REGISTERED = re.compile(r"^@register\(.*?^def (\w+)\(", re.DOTALL | re.MULTILINE)
_registered: dict[str, ModelEntry] = {}


def _registry() -> dict[str, ModelEntry]:
    for family in _FAMILIES:
        importlib.import_module(f"pipeline.models.{family}")
    return _registered


def register(description: str, **paper) -> Callable:
    """Decorator: put a builder function into the registry under its own name."""

    def add(build: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        _registered[build.__name__] = ModelEntry(build.__name__, build, description, **paper)
        return build

    return add


def list_models() -> list[str]:
    """Names that :func:`create_model` knows, sorted."""
    return sorted({*_names_in_families(), *_registered})


@cache
def _names_in_families() -> tuple[str, ...]:
    """What the families will register, read from their sources: to import them, and with them PyTorch, takes seconds."""
    sources = (Path(__file__).with_name(f"{family}.py").read_text(encoding="utf-8") for family in _FAMILIES)
    return tuple(name for source in sources for name in _REGISTERED.findall(source))


def check_name(name: str) -> None:
    """See that there is a model of that name, without importing any.

    Raises:
        UserError: unknown name.
    """
    known = list_models()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise UserError(f"model.name is {name!r}{hint}, but it must be one of: {', '.join(known)}.")


def model_entry(name: str) -> ModelEntry:
    """The registry's entry.

    Raises:
        UserError: unknown name.
    """
    check_name(name)
    return _registry()[name]


def create_model(
    name: str,
    num_classes: int = 1000,
    image_size: int = 224,
    drop_path: float = 0.0,
    activation_checkpointing: bool = False,
    switches: Mapping[str, Any] = MappingProxyType({}),
) -> nn.Module:
    """Build a model with fresh weights from PyTorch's default generator.

    Args:
        switches: the family's ablations by name (its ``Switches`` class); those not named keep the paper's choice.

    Returns:
        A :class:`~pipeline.models.base.VisionModel`, (B, 3, H, W) -> (B, num_classes).

    Raises:
        UserError: unknown name or switch, or an image size that the model cannot take.
    """
    entry = model_entry(name)
    return entry.build(
        switches=section_from_dict(entry.switches, switches, key="model.switches"),
        num_classes=num_classes,
        image_size=image_size,
        drop_path=drop_path,
        activation_checkpointing=activation_checkpointing,
    )
