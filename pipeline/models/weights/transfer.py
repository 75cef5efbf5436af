"""Transfer trained weights: reinitialize the head for other classes, resample position embeddings for another image size."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pipeline.errors import UserError, first_few
from pipeline.models.common.base import VisionModel
from pipeline.models.common.layers import resample_grid
from pipeline.models.weights.reference_names import added_names, fitting_names, listed_misfits, names_without_head

_WHOSE = ("this project's names", "the names of the authors' code")
_MOST_TOKENS = 2**18  # largest grid that is resampled (8192 x 8192 pixels at patch 16); bounds memory for malformed files


def load_pretrained(
    model: VisionModel,
    weights: Mapping[str, Tensor],
    source: str,
    their_classes: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
) -> list[str]:
    """Load pretrained weights, possibly for other classes or another image size.

    The head is loaded only if the class names are equal, in the same order, otherwise the model keeps its own; where either side
    has no names, an equal number of classes suffices. A feature form takes the weights of a classifier without its head.

    Args:
        model: from ``create_model``.
        weights: a state dict of the same model, entirely under our names or entirely under the authors'.
        source: of the weights, for messages.
        their_classes, classes: class names of the outputs of ``weights`` and of ``model``; None: unknown.

    Returns:
        Sentences for the log: on the head, and on each tensor that was not copied unchanged.

    Raises:
        UserError: names, shapes or dtypes differ in any other way, or values are not finite.
    """
    own = model.state_dict()
    # A file may hold arbitrary objects.
    for name, value in weights.items():
        if not isinstance(name, str):
            found = f"{name!r:.40} ({type(name).__name__})"
            raise UserError(f"{source}: the names of tensors must be strings, got {found}", "pass a file with a state dict")
        ordinary = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta
        if not ordinary or value.is_quantized or value.is_complex():
            raise UserError(f"{source}: {name} is not a dense tensor of real numbers", "pass a file with a plain state dict")
    weights = model.prepared_weights(weights, source)
    given = names_without_head(model, weights.keys() - model.reference_tables().keys())
    added = added_names(model, given)
    naming = fitting_names(model, given)  # so that an error lists the file's differences and not all of its names
    authors = any(name != ours for name, ours in naming.items())
    missing, unknown = sorted(naming.keys() - given - added), sorted(given - naming.keys())
    others = None if their_classes is None or classes is None else first_difference(their_classes, classes)
    notes, misfits, keeps_head = [], [], True
    loaded = {name: own[name] for name in added}
    for its_name in sorted(naming.keys() & given):
        name = naming[its_name]
        value, target = weights[its_name], own[name]
        is_head = name.startswith(model.head_names)
        if value.is_floating_point() != target.is_floating_point():
            misfits.append(f"{its_name} {value.dtype} instead of {target.dtype}")
        elif is_head and (others or value.shape != target.shape):
            loaded[name], keeps_head = target, False
            why = f"{tuple(value.shape)} there, {tuple(target.shape)} here" if value.shape != target.shape else others
            notes.append(f"{name} is initialized from scratch: {why}")
        elif value.shape == target.shape:
            loaded[name] = value.to(target.dtype)
        elif name == "position_embedding.weight" and _are_grids(value.shape, target.shape, model.leading_tokens):
            loaded[name] = resample_positions(value, target.shape, model.leading_tokens)
            notes.append(f"{name} is resampled from {tuple(value.shape)} to {tuple(target.shape)}")
        else:
            misfits.append(f"{its_name} {tuple(value.shape)} instead of {tuple(target.shape)}")
    if missing or unknown or misfits:
        misfit = f"{source} does not fit {type(model).__name__} under {_WHOSE[authors]}"
        remedy = f"set model.name and model.switches to match these weights, which may have {_WHOSE[False]} or {_WHOSE[True]}"
        raise UserError(f"{misfit}: {listed_misfits(missing, unknown, misfits)}", remedy)
    check_finite(loaded, source)
    model.load_state_dict(loaded, strict=True)
    if model.strides:
        notes.append("the head is left out: the model gives features")
    elif keeps_head and their_classes is None:
        notes.append(f"the head is loaded, although {source} does not name its classes: check that they are yours, in order")
    elif keeps_head:
        notes.append("the head is kept: its classes are the same")
    return [f"they have {_WHOSE[True]}", *notes] if authors else notes


def first_difference(theirs: Sequence[str], ours: Sequence[str]) -> str | None:
    """The difference between two lists of class names in words; None: equal."""
    for index, (there, here) in enumerate(zip(theirs, ours)):
        if there != here:
            return f"other classes ({len(theirs)} and {len(ours)}, first different at index {index}: {there!r} and {here!r})"
    return None if len(theirs) == len(ours) else f"other classes ({len(theirs)} and {len(ours)})"


def check_finite(weights: Mapping[str, Tensor], source: str) -> None:
    """Raise a ``UserError`` that names ``source`` if a value of a state dict is infinite or NaN."""
    if bad := [name for name, value in weights.items() if value.is_floating_point() and not value.isfinite().all()]:
        problem = f"{source} has values that are not finite in {len(bad)} of {len(weights)} tensors ({first_few(bad, 5)})"
        raise UserError(problem, "take weights of an earlier step")


def resample_positions(value: Tensor, shape: torch.Size, leading_tokens: int) -> Tensor:
    """Resample position embeddings of a square grid, (..., leading_tokens + n * n, D), to a ``shape`` with another grid size,
    (..., leading_tokens + m * m, D), bicubic, as in DeiT's fine-tuning. Leading tokens (class token) are copied."""
    old, new = (math.isqrt(count - leading_tokens) for count in (value.shape[-2], shape[-2]))
    return resample_grid(value.double(), (old, old), (new, new), leading_tokens).to(value.dtype)


def _are_grids(shape: torch.Size, wanted: torch.Size, leading_tokens: int) -> bool:
    """Whether both shapes are position embeddings of square grids that differ in grid size only."""
    if len(shape) != len(wanted) or len(shape) < 2 or (*shape[:-2], shape[-1]) != (*wanted[:-2], wanted[-1]):
        return False
    tokens = [each[-2] - leading_tokens for each in (shape, wanted)]
    return all(0 < count <= _MOST_TOKENS and math.isqrt(count) ** 2 == count for count in tokens)
