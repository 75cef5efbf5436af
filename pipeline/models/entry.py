"""Describe the models, without PyTorch: what a family registers for each of its sizes.

The registry reads it, and loads the families.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.models.common.base import Switches, VisionModel

TIMM_PREFIX = "timm:"
ENTRY_POINTS = "pervit.models"  # group of an installed package's models: name = "module:build"
_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


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
        paper_speed: images per second in inference, on the paper's GPU.
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
    paper_speed: float | None = None


registered: dict[str, ModelEntry] = {}

Size = tuple[Any, ...]  # see register


def register(
    family: Callable[..., VisionModel], switches: type[Switches], paper: str, data: tuple[int, int] = (224, 1000), **sizes: Size
) -> None:
    """Register the sizes of a family.

    Args:
        family: called with a layout and with what ``build`` of :class:`ModelEntry` is.
        switches: the family's ablations.
        paper: with the table.
        data: image size and number of classes that the paper's figures are for.
        sizes: name = (layout, one line for the list of models, the paper's parameters in millions, GMACs, top-1 in percent
            and, where it has them, images per second).
    """
    for name, (layout, description, params_m, gmacs, top1, *speed) in sizes.items():
        build = partial(family, layout)
        registered[name] = ModelEntry(name, build, description, paper, switches, params_m, gmacs, top1, *data, *speed)


def is_timm(name: str) -> bool:
    """Whether ``model.name`` is one of timm's models."""
    return name.startswith(TIMM_PREFIX)


@cache
def installed_models() -> dict[str, str]:
    """The models of installed packages: name -> ``module:build``."""
    return {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}


def import_path(name: str) -> str | None:
    """The ``module:build`` of a model of somebody else's code; None: of no such model."""
    return name if not is_timm(name) and _PATH.fullmatch(name) else installed_models().get(name)
