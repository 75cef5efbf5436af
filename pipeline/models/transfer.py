"""Starting from trained weights: another number of classes gets a new head, another image size resampled positions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.errors import UserError
from pipeline.models.base import VisionModel
from pipeline.models.reference import authors_names

_SHOWN = 5  # names in a message
_WHOSE = ("this project's names", "the names of the authors' code")
_MOST_TOKENS = 2**18  # of a grid that is resampled


def load_pretrained(
    model: VisionModel,
    weights: Mapping[str, Tensor],
    source: str,
    their_classes: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
) -> list[str]:
    """Load weights that were trained for perhaps other classes and another image size.

    The head is taken over only if its outputs mean the same: the same class names in the same order. Where one side has no
    names, the same number of them is enough. The names of the weights may be ours or those of the authors' published code.

    Args:
        model: from ``create_model``; keeps its fresh head where the classes differ.
        weights: a state dict of the same model, its names all ours or all the authors'.
        source: where it is from, for errors.
        their_classes: what the outputs of ``weights`` are for, by index; None: not known.
        classes: what those of ``model`` are for; None: not known.

    Returns:
        A sentence on the head, and one for each thing that was not simply copied.

    Raises:
        UserError: names, shapes or types differ otherwise, with both sides' differences; or values are not finite.
    """
    own = model.state_dict()
    _check_is_state_dict(weights, source)
    given = weights.keys() - model.reference_tables().keys()
    ours, theirs = {name: name for name in own}, authors_names(model)
    # Whichever fits better, so that an error lists what is wrong with the file, not all names in it.
    naming = theirs if len(given ^ theirs.keys()) < len(given ^ ours.keys()) else ours
    missing, unknown = sorted(naming.keys() - given), sorted(given - naming.keys())
    others = first_difference(their_classes, classes) if None not in (their_classes, classes) else None
    said, misfits, loaded, keeps_head = [], [], {}, True
    for its_name in sorted(naming.keys() & given):
        name = naming[its_name]
        value, target = weights[its_name], own[name]
        is_head = name.startswith(model.head_names)
        if value.is_floating_point() != target.is_floating_point():
            misfits.append(f"{its_name} {value.dtype} instead of {target.dtype}")
        elif is_head and (others or value.shape != target.shape):
            loaded[name], keeps_head = target, False
            why = f"{tuple(value.shape)} there, {tuple(target.shape)} needed" if value.shape != target.shape else others
            said.append(f"{name} starts anew: {why}")
        elif value.shape == target.shape:
            loaded[name] = value.to(target.dtype)
        elif name in model.position_names() and _are_grids(value.shape, target.shape, model.leading_tokens):
            loaded[name] = resample_positions(value, target.shape, model.leading_tokens)
            said.append(f"{name} is resampled from {tuple(value.shape)} to {tuple(target.shape)}")
        else:
            misfits.append(f"{its_name} {tuple(value.shape)} instead of {tuple(target.shape)}")
    if missing or unknown or misfits:
        raise UserError(
            f"{source} does not fit {type(model).__name__} under {_WHOSE[naming is theirs]}: {_listed(missing, 'missing')}, "
            f"{_listed(unknown, 'unknown')}, {_listed(misfits, 'of another shape')}, 0 of each needed: set model.name and "
            f"model.switches to those of these weights, which may have {_WHOSE[False]} or {_WHOSE[True]}."
        )
    check_finite(loaded, source)
    model.load_state_dict(loaded, strict=True)
    if keeps_head and their_classes is None:
        said.append(
            f"the head is taken over, though {source} does not say what its outputs are for: see that they are your classes, "
            f"in the same order"
        )
    elif keeps_head:
        said.append("the head is kept: its classes are the same")
    return [f"they have {_WHOSE[True]}", *said] if naming is theirs else said


def first_difference(theirs: Sequence[str], ours: Sequence[str]) -> str | None:
    """Where two lists of class names differ, in words; None: they are the same."""
    for index, (there, here) in enumerate(zip(theirs, ours)):
        if there != here:
            return f"other classes ({len(theirs)} and {len(ours)}, first different at index {index}: {there!r} and {here!r})"
    return None if len(theirs) == len(ours) else f"other classes ({len(theirs)} and {len(ours)})"


def check_finite(weights: Mapping[str, Tensor], source: str) -> None:
    """Refuse weights that no model can compute with.

    Args:
        weights: a state dict.
        source: where it is from.

    Raises:
        UserError: a value is infinite or not a number.
    """
    bad = [name for name, value in weights.items() if value.is_floating_point() and not value.isfinite().all()]
    if bad:
        raise UserError(
            f"{source} has values that are not finite in {len(bad)} of {len(weights)} tensors ({', '.join(bad[:_SHOWN])}"
            f"{', ...' if len(bad) > _SHOWN else ''}), finite ones needed: take weights of an earlier step."
        )


def resample_positions(value: Tensor, shape: torch.Size, leading_tokens: int) -> Tensor:
    """Position embeddings of a square grid for a grid of another size, bicubic (DeiT's and ViT's fine-tuning).

    Args:
        value: (..., leading_tokens + n * n, D).
        shape: wanted, (..., leading_tokens + m * m, D).
        leading_tokens: class tokens and the like in front, which have no place and are kept.

    Returns:
        A tensor of ``shape``.
    """
    kept, grid = value[..., :leading_tokens, :], value[..., leading_tokens:, :]
    old, new = math.isqrt(grid.shape[-2]), math.isqrt(shape[-2] - leading_tokens)
    maps = grid.reshape(-1, old, old, grid.shape[-1]).permute(0, 3, 1, 2).float()  # (variants, D, n, n)
    maps = F.interpolate(maps, size=(new, new), mode="bicubic", align_corners=False)
    grid = maps.permute(0, 2, 3, 1).reshape(*shape[:-2], new * new, shape[-1]).to(value.dtype)
    return torch.cat([kept, grid], dim=-2)


def _check_is_state_dict(weights: Mapping[str, Tensor], source: str) -> None:
    """Names with ordinary tensors; a file may hold anything."""
    for name, value in weights.items():
        if not isinstance(name, str):
            found = f"{name!r:.40} ({type(name).__name__})"
            raise UserError(f"{source} has a tensor called {found}, text needed: pass a file with a state dict.")
        ordinary = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta
        if not ordinary or value.is_quantized or value.is_complex():
            raise UserError(f"{source}: {name} is no ordinary tensor of numbers: pass a file with a plain state dict.")


def _are_grids(shape: torch.Size, wanted: torch.Size, leading_tokens: int) -> bool:
    """Whether both are position embeddings of a square grid, so that one can be resampled to the other."""
    if len(shape) != len(wanted) or len(shape) < 2 or (*shape[:-2], shape[-1]) != (*wanted[:-2], wanted[-1]):
        return False
    tokens = [each[-2] - leading_tokens for each in (shape, wanted)]
    return all(0 < count <= _MOST_TOKENS and math.isqrt(count) ** 2 == count for count in tokens)


def _listed(names: list[str], what: str) -> str:
    shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    return f"{len(names)} {what}" + (f" ({shown})" if names else "")
