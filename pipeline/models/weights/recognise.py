"""Which model a state dict is of: the one whose names and shapes are those of its tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import get_args

import torch
from torch import Tensor

from pipeline.errors import UserError
from pipeline.models.common.base import VisionModel
from pipeline.models.registry import create_model, list_models, model_entry
from pipeline.models.weights.exported import Names
from pipeline.models.weights.reference_names import authors_names

_HEADS = ("head.weight", "mlp_head.weight")  # of a classifier, (classes, width): ours and the authors'
_CLOSEST = 5  # tensors that may differ in a hint


def recognise(weights: Mapping[str, Tensor], source: str) -> tuple[str, int, int, Names]:
    """Find the model, with the switches of its paper, that a state dict is of.

    Args:
        weights: under our names or the authors'.
        source: the file, for messages.

    Returns:
        Its name, number of classes, image size, and whose names the tensors have. Models whose weights do not depend on the size
        of the images get that of their paper.

    Raises:
        UserError: it is of none.
    """
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
    raise UserError(
        f"{source} has no description of its model, and its {len(weights)} tensors are those of no model here with its paper's switches{hint}",
        "start a run from it with train.init_from, model.name and model.switches, or pass a file that export wrote",
    )


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
