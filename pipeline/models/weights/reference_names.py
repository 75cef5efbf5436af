"""Load and save state dicts under the names of the authors' code, and find the model that a state dict is of, by names and shapes.

Each family lists the name pairs once, for both directions.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from pipeline.errors import UserError, first_few
from pipeline.models.common.base import VisionModel
from pipeline.models.registry import create_model, list_models, model_entry

Names = Literal["ours", "authors"]  # authors: those of the published code
_HEADS = ("head.weight", "mlp_head.weight")  # of a classifier, (classes, width): ours and the authors'
_CLOSEST = 5  # tensors that may differ in a hint


def load_reference_state_dict(model: VisionModel, state_dict: Mapping[str, Tensor]) -> VisionModel:
    """Load a state dict under the authors' names strictly into a model from ``create_model``; a feature form takes all but the
    head. Raises UserError: a name is missing, unknown or duplicate, or a shape differs."""
    kept = names_without_head(model, state_dict.keys() - model.reference_tables().keys())
    renamed: dict[str, Tensor] = {}
    for key in (key for key in state_dict if key in kept):
        name = _renamed(key, model.reference_names)
        if name in renamed:
            raise UserError(f"reference state dict: two keys map to {name!r} (the second is {key!r})", "remove one of them")
        renamed[name] = state_dict[key]
    own = model.state_dict()
    renamed |= {name: own[name] for name in added_names(model, renamed)}
    remedy = "pass the authors' state dict of the same model, image size and classes (of a training checkpoint, its 'model')"
    load_fitting(model, renamed, f"reference state dict does not fit {type(model).__name__}: ", remedy)
    return model


def reference_state_dict(model: VisionModel) -> dict[str, Tensor]:
    """The model's weights under the names of the authors' code; :func:`load_reference_state_dict` reads them back.

    They are complete and in the authors' shapes. Parameters and BatchNorm statistics share the model's memory, as in
    ``state_dict()``; constant tables (PosMLP's) are computed. Raises UserError: the authors' code does not support one of the
    model's switches, or the model is a feature form."""
    if model.strides:
        problem = f"this {type(model).__name__} is in its feature form, which has no head and which the authors' code lacks"
        raise UserError(problem, "pass a model from create_model without features")
    if switch := model.unpublished_switch():
        code = f"the authors' code of {type(model).__name__}"
        problem = f"model.switches.{switch} is {getattr(model.switches, switch)!r}, which {code} does not support"
        raise UserError(problem, "export the model under this project's own names (model.state_dict())")
    own = model.state_dict()
    return {theirs: own[name] for theirs, name in authors_names(model).items()} | model.reference_tables()


def authors_names(model: VisionModel) -> dict[str, str]:
    """Authors' name -> ours of each weight, by the name pairs alone: also for switches that the authors' code lacks."""
    pairs = [(own, authors) for authors, own in model.reference_names]
    return {_renamed(name, pairs): name for name in model.state_dict()}


def fitting_names(model: VisionModel, given: Set[str]) -> dict[str, str]:
    """Name -> ours of each weight, under the names, ours or the authors', that are more like those of a file."""
    ours, theirs = {name: name for name in model.state_dict()}, authors_names(model)
    return theirs if len(given ^ theirs.keys()) < len(given ^ ours.keys()) else ours


def names_without_head(model: VisionModel, names: Iterable[str]) -> set[str]:
    """Names, ours or the authors', without those of a classifier's head if ``model`` is a feature form; a classifier: all."""
    return {key for key in names if not (model.strides and _renamed(key, model.reference_names).startswith(model.head_names))}


def added_names(model: VisionModel, given: Iterable[str]) -> set[str]:
    """Weights of a feature form that a classifier's weights lack; none if any of them is among ``given``."""
    added = {name for name in model.state_dict() if name.startswith("output_norms.")}
    return set() if added & set(given) else added


def _renamed(name: str, pairs: Sequence[tuple[str, str]]) -> str:
    """Rename by the first matching (before, after) pair; unchanged without a match."""
    for before, after in pairs:
        # A trailing dot makes ``before`` a prefix.
        pattern = re.escape(before).replace(r"\*", r"(\d+)") + ("" if before.endswith(".") else "$")
        if found := re.match(pattern, name):
            return after.replace("*", "{}").format(*found.groups()) + name[found.end() :]
    return name


def load_fitting(model: nn.Module, weights: Mapping[str, Tensor], problem: str, remedy: str) -> None:
    """Load a state dict. Raises UserError: names or shapes differ from the model's: ``problem``, how, and ``remedy``."""
    own = model.state_dict()
    shapes = [
        f"{name} {tuple(weights[name].shape)} instead of {tuple(value.shape)}"
        for name, value in own.items()
        if name in weights and weights[name].shape != value.shape
    ]
    missing, unknown = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    if missing or unknown or shapes:
        raise UserError(problem + listed_misfits(missing, unknown, shapes), remedy)
    model.load_state_dict(weights)


def listed_misfits(missing: Sequence[str], unknown: Sequence[str], shapes: Sequence[str]) -> str:
    """How many tensors are missing, unknown and of another shape, with the first of them, for a message."""
    parts = ((missing, "missing"), (unknown, "unknown"), (shapes, "of another shape"))
    return ", ".join(f"{len(names)} {what}" + (f" ({first_few(names, 5)})" if names else "") for names, what in parts)


def recognise(weights: Mapping[str, Tensor], source: str) -> tuple[str, int, int, Names]:
    """Find the model, with the switches of its paper, that a state dict under our names or the authors' is of. Returns its
    name, number of classes, image size (the paper's where the weights do not depend on it), and whose names these are. Raises
    UserError: it is of none."""
    heads = [weights[name] for name in _HEADS if name in weights and weights[name].ndim == 2]
    closest: tuple[int, str] | None = None
    for name in list_models() if heads else ():
        papers = model_entry(name).image_size
        model = _without_memory(name, len(heads[0]), papers)
        for names in get_args(Names):
            off, size = _compare(model, weights, names, papers)
            if off and size:  # position embeddings of another grid
                model = _without_memory(name, len(heads[0]), size)
                off, _ = _compare(model, weights, names, size)
            if not off:
                return name, len(heads[0]), size or papers, names
            closest = min(closest or (off, name), (off, name))
    hint = f"; {closest[1]} comes closest, but for {closest[0]} of them" if closest and closest[0] <= _CLOSEST else ""
    must = "must describe its model or have the tensors of a model with its paper's switches"
    remedy = "start a run from it with train.init_from, model.name and model.switches, or pass a file that export wrote"
    raise UserError(f"{source} {must}, got {len(weights)} others{hint}", remedy)


def _without_memory(name: str, num_classes: int, image_size: int) -> VisionModel:
    with torch.device("meta"):
        return create_model(name, num_classes, image_size)


def _compare(model: VisionModel, weights: Mapping[str, Tensor], names: str, model_size: int) -> tuple[int, int | None]:
    """How many tensors are missing, unknown or of another shape, and the image size by the position embeddings if that differs."""
    own = model.state_dict()
    renamed = {name: name for name in own} if names == "ours" else authors_names(model)
    tables = model.reference_tables().keys() if names == "authors" and model.reference_names else set()
    off = len(renamed.keys() ^ (weights.keys() - tables))
    size = None
    for theirs in renamed.keys() & weights.keys():
        found, needed = weights[theirs].shape, own[renamed[theirs]].shape
        if found == needed:
            continue
        off += 1
        if renamed[theirs] == "position_embedding.weight" and len(found) == len(needed):
            there, here = found[-2] - model.leading_tokens, needed[-2] - model.leading_tokens
            side = math.isqrt(there)
            if side**2 == there and there > 0:
                size = side * model_size // math.isqrt(here)
    return off, size
