"""Find models by name and build them; describe them, as their families register them. The names are known without PyTorch."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pipeline.config import section_from_dict
from pipeline.errors import UserError, did_you_mean
from pipeline.models.timm.names import TIMM_PREFIX, check_timm_name, is_timm

if TYPE_CHECKING:
    from pipeline.config import Config
    from pipeline.models.common.base import Switches, VisionModel

_FAMILIES = {  # module of this package -> the models that it registers: it is imported when one of them is asked for
    "convit": "convit_ti convit_ti_plus convit_s convit_s_plus convit_b convit_b_plus",
    "deit": "deit_t deit_ti_plus deit_s deit_s_plus deit_b deit_b_plus deit3_s deit3_m deit3_b",
    "gated_mlp.gmlp": "gmlp_s",
    "gated_mlp.posmlp": "posmlp_t posmlp_s posmlp_b",
    "lsat.model": "lsat_t_32 lsat_s_32 lsat_b_32 lsat_t_224 lsat_s_224",
    "pervit.model": "pervit_t pervit_s pervit_m",
}
TRUSTED = "PERVIT_TRUSTED_MODELS"  # names of models, separated by commas, whose code files may have run
_MODULE_OF = {name: module for module, names in _FAMILIES.items() for name in names.split()}
ENTRY_POINTS = "pervit.models"  # group of an installed package's models: name = "module:build"
_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@dataclass(frozen=True)
class ModelEntry:
    """A model and its paper's figures, None where the paper has none."""

    name: str
    build: Callable[..., VisionModel]  # called with ``switches`` and the fields of ``ModelOptions`` in common/base.py
    description: str  # one line for the list of models
    paper: str  # with the table
    switches: type[Switches]  # the family's ablations
    paper_params_m: float | None = None  # millions
    paper_gmacs: float | None = None  # 1e9 multiply-accumulates, at the image size that follows
    paper_top1: float | None = None  # percent, on the paper's data set
    image_size: int = 224  # that the paper's figures are for, like the classes
    num_classes: int = 1000
    paper_speed: float | None = None  # images per second in inference, on the paper's GPU


registered: dict[str, ModelEntry] = {}


def register(
    family: Callable[..., VisionModel],
    switches: type[Switches],
    paper: str,
    data: tuple[int, int] = (224, 1000),
    **sizes: tuple[Any, ...],
) -> None:
    """Register the sizes of a family.

    Args:
        data: image size and number of classes that the paper's figures are for.
        sizes: name = (layout, with which ``family`` is called, one line for the list of models, the paper's parameters in
            millions, GMACs, top-1 in percent and, where it has them, images per second).
    """
    for name, (layout, description, params_m, gmacs, top1, *speed) in sizes.items():
        build = partial(family, layout)
        registered[name] = ModelEntry(name, build, description, paper, switches, params_m, gmacs, top1, *data, *speed)


@cache
def installed_models() -> dict[str, str]:
    """The models of installed packages: name -> ``module:build``."""
    return {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}


def import_path(name: str) -> str | None:
    """The ``module:build`` of a model of somebody else's code; None: of no such model."""
    return name if not is_timm(name) and _PATH.fullmatch(name) else installed_models().get(name)


def list_models() -> list[str]:
    """Names that :func:`create_model` knows, sorted."""
    return sorted({*_MODULE_OF, *registered})


def check_name(name: str) -> None:
    """Raise a UserError unless there is a model of that name: ours, ``timm:NAME``, ``module:build`` or an entry point's."""
    if is_timm(name):
        check_timm_name(name)
        return
    known = list_models()
    if name not in known and not import_path(name):
        these = ", ".join([*known, *installed_models()])
        remedy = did_you_mean(name, known, "choose one of these", "{!r}")
        raise UserError(f"model.name must be timm:NAME, module:build or one of {these}, got {name!r}", remedy)


def model_entry(name: str) -> ModelEntry:
    """The registry entry of a model. Raises UserError: an unknown name, or one of timm's, and timm does not load."""
    check_name(name)
    if name in list_models():
        if name not in registered:
            importlib.import_module(f"pipeline.models.{_MODULE_OF[name]}")
        return registered[name]
    from pipeline.models.imported import build_imported  # imported late, with PyTorch
    from pipeline.models.timm.classifier import TimmSwitches, build_timm, import_timm

    if path := import_path(name):
        return ModelEntry(name, partial(build_imported, path, name), f"a model of {path}", "", TimmSwitches)
    timm = import_timm()
    cfg = timm.get_pretrained_cfg(name.removeprefix(TIMM_PREFIX))  # of its weights
    sizes = {"image_size": cfg.input_size[-1] if cfg else 224, "num_classes": (cfg.num_classes if cfg else 0) or 1000}
    return ModelEntry(name, partial(build_timm, name), "a model of timm", f"timm {timm.__version__}", TimmSwitches, **sizes)


def check_trusted(name: str, source: object) -> None:
    """See that a file, ``source``, may name the model: code of ``module:build`` runs only if the user has named it too. Raises
    UserError: the environment does not have it."""
    trusted = {*list_models(), *installed_models(), *os.environ.get(TRUSTED, "").split(",")}
    if name not in trusted and import_path(name):
        raise UserError(f"{source} is of the model {name}, whose code would run", f"set {TRUSTED}={name} if you trust it")


def model_of(config: Config) -> VisionModel:
    """The model that a config describes, randomly initialized; raises what :func:`create_model` raises."""
    its, recompute = config.model, config.train.activation_checkpointing
    model = create_model(its.name, its.num_classes, its.image_size, its.drop_path, recompute, its.arguments)
    if config.train.freeze:
        model.freeze(config.train.freeze)
    return model


def create_model(
    name: str,
    num_classes: int = 1000,
    image_size: int = 224,
    drop_path: float = 0.0,
    activation_checkpointing: bool = False,
    switches: Mapping[str, Any] = MappingProxyType({}),
    features: bool = False,
) -> VisionModel:
    """Build a randomly initialized model; draws from PyTorch's default generator.

    Args:
        name: one of :func:`list_models`, ``timm:NAME``, ``module:build`` or an entry point's.
        num_classes, image_size, drop_path, activation_checkpointing: see :class:`~pipeline.models.common.base.ModelOptions`.
        switches: ablation switches by name (fields of the family's ``Switches`` class); the others keep the paper's setting. Of others'
            models, arguments of their function.
        features: build the feature form (:func:`~pipeline.models.common.base.as_features`), without a classifier.

    Returns:
        The model, (B, 3, H, W) -> (B, num_classes); with ``features`` -> [(B, widths[i], H / strides[i], W / strides[i]), ...].

    Raises:
        UserError: unknown name or switch, or an image size that the model does not support.
    """
    entry = model_entry(name)
    model = entry.build(
        switches=section_from_dict(entry.switches, switches, key="model.switches"),
        num_classes=num_classes,
        image_size=image_size,
        drop_path=drop_path,
        activation_checkpointing=activation_checkpointing,
    )
    from pipeline.models.common.base import as_features  # imported late: the list of models does not need PyTorch

    return as_features(model) if features else model


def parameter_count(name: str, num_classes: int, image_size: int, switches: Mapping[str, Any] = MappingProxyType({})) -> int:
    """Parameters of a model of :func:`create_model`, on the meta device: nothing is allocated, whatever its size."""
    import torch  # imported late: the list of models does not need it

    with torch.device("meta"):
        model = create_model(name, num_classes, image_size, switches=switches)
    return sum(parameter.numel() for parameter in model.parameters())
