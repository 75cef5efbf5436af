"""The registry of models: names, papers and builders."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import nn

from pipeline.config import section_from_dict
from pipeline.errors import UserError
from pipeline.models.common.base import Switches


@dataclass(frozen=True)
class ModelEntry:
    """A registered model and its paper's figures."""

    name: str
    build: Callable[..., nn.Module]
    description: str
    paper: str  # with the table
    paper_params_m: float | None  # millions; None, here and below: not in the paper
    paper_gmacs: float | None  # 1e9 multiply-accumulates at the paper's image size
    paper_top1: float | None  # percent, on the paper's data set
    image_size: int = 224  # of the paper's figures
    num_classes: int = 1000
    switches: type[Switches] = Switches  # the family's ablation switches


_FAMILIES = (
    "convit.model",
    "deit",
    "gated_mlp.gmlp",
    "gated_mlp.posmlp",
    "lsat.model",
    "pervit.model",
)  # modules that register their models on import
_registered: dict[str, ModelEntry] = {}


def _registry() -> dict[str, ModelEntry]:
    for family in _FAMILIES:
        importlib.import_module(f"pipeline.models.{family}")
    return _registered


def register(description: str, **paper) -> Callable:
    """Decorator: register a builder function under its own name.

    Args:
        description: one line for the list of models.
        paper: further fields of :class:`ModelEntry`.
    """

    def add(build: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        _registered[build.__name__] = ModelEntry(build.__name__, build, description, **paper)
        return build

    return add


def list_models() -> list[str]:
    """Sorted names of all models."""
    return sorted(_registry())


def model_entry(name: str) -> ModelEntry:
    """The registry entry of a model.

    Raises:
        UserError: unknown name.
    """
    known = _registry()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise UserError(f"model.name is {name!r}{hint}, but it must be one of: {', '.join(list_models())}.")
    return known[name]


def create_model(
    name: str,
    num_classes: int = 1000,
    image_size: int = 224,
    drop_path: float = 0.0,
    activation_checkpointing: bool = False,
    switches: Mapping[str, Any] = MappingProxyType({}),
) -> nn.Module:
    """Build a randomly initialized model; draws from PyTorch's default generator.

    Args:
        name: one of :func:`list_models`.
        num_classes: outputs of the classifier.
        image_size: side of the square input in pixels.
        drop_path: stochastic depth rate of the last block.
        activation_checkpointing: recompute blocks in the backward pass.
        switches: ablation switches by name (fields of the family's ``Switches`` class); the others keep the paper's setting.

    Returns:
        A :class:`~pipeline.models.common.base.VisionModel`, (B, 3, H, W) -> (B, num_classes).

    Raises:
        UserError: unknown name or switch, or an image size that the model does not support.
    """
    entry = model_entry(name)
    return entry.build(
        switches=section_from_dict(entry.switches, switches, key="model.switches"),
        num_classes=num_classes,
        image_size=image_size,
        drop_path=drop_path,
        activation_checkpointing=activation_checkpointing,
    )
