"""Starting from trained weights: another number of classes gets a new head, another image size resampled positions."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.errors import UserError
from pipeline.models.base import VisionModel

_SHOWN = 5  # names in a message


def load_pretrained(model: VisionModel, weights: Mapping[str, Tensor], source: str) -> list[str]:
    """Load weights that were trained for perhaps other classes and another image size.

    Args:
        model: from ``create_model``; keeps its fresh head where the number of classes differs.
        weights: a state dict of the same model.
        source: where it is from, for the error.

    Returns:
        A sentence for each thing that was not simply copied.

    Raises:
        UserError: names or shapes differ otherwise; lists both sides' differences.
    """
    own = model.state_dict()
    missing, unknown = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    said, misfits, loaded = [], [], {}
    for name in sorted(own.keys() & weights.keys()):
        value, target = weights[name], own[name]
        if value.shape == target.shape:
            loaded[name] = value
        elif name.startswith(model.head_names):
            loaded[name] = target
            said.append(f"{name} starts anew: {tuple(value.shape)} there, {tuple(target.shape)} needed")
        elif name in model.position_names():
            loaded[name] = resample_positions(value, target.shape, model.leading_tokens)
            said.append(f"{name} is resampled from {tuple(value.shape)} to {tuple(target.shape)}")
        else:
            misfits.append(f"{name} {tuple(value.shape)} instead of {tuple(target.shape)}")
    if missing or unknown or misfits:
        raise UserError(
            f"{source} does not fit {type(model).__name__}: {_listed(missing, 'missing')}, {_listed(unknown, 'unknown')}, "
            f"{_listed(misfits, 'of another shape')}, 0 of each needed: set model.name and model.switches to those of these weights."
        )
    model.load_state_dict(loaded, strict=True)
    return said


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


def _listed(names: list[str], what: str) -> str:
    shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    return f"{len(names)} {what}" + (f" ({shown})" if names else "")
