"""Give feature maps: use a classifier's trunk as the backbone of a detector or segmenter."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.models.common.layers import constant_table

Trunk = TypeVar("Trunk", bound="FeatureSource")


class GridEmbedding(nn.Module):
    """Base of learned position embeddings, which have one vector per token of a fixed grid.

    Attributes:
        any_grid: resample the embedding to the grid of the image (:func:`resample_grid`); False: another grid is an error.
    """

    any_grid: bool = False


class FeatureSource(nn.Module):
    """What :func:`as_features` needs of a model; :class:`~pipeline.models.common.base.VisionModel` is one.

    Attributes:
        strides: pixels per cell of each feature map. Empty in a classifier.
        widths: channels of each feature map. Empty in a classifier.
        head_names: prefixes of the names of the classifier's parameters.
    """

    strides: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()
    head_names: tuple[str, ...] = ("head.",)
    norm: nn.LayerNorm  # of the last map; every family has it
    output_norms: nn.ModuleList  # of the maps before the last, in the feature form only

    def feature_layout(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(strides, widths) of the maps that :meth:`feature_maps` returns."""
        raise NotImplementedError(f"{type(self).__name__} gives no feature maps")

    def feature_maps(self, images: Tensor, noise: Tensor | None = None) -> list[Tensor]:
        """(B, 3, H, W) -> (B, widths[i], H / strides[i], W / strides[i]) for each i, sides rounded up."""
        raise NotImplementedError

    def normed_map(self, x: Tensor, level: int) -> Tensor:
        """LayerNorm of map ``level``: (B, rows, columns, width) -> (B, width, rows, columns), in channels_last layout."""
        norm = self.norm if level == len(self.widths) - 1 else self.output_norms[level]
        return norm(x).permute(0, 3, 1, 2)

    def in_features_only(self, name: str) -> bool:
        """Whether a parameter of that name is one that the feature form has and the classifier lacks."""
        return name.startswith("output_norms.")


def as_features(model: Trunk) -> Trunk:
    """Turn a classifier into its feature form, in place: ``model(images)`` is then the list of its feature maps.

    The head goes. All other parameters stay, under their names. Each map but the last gets a LayerNorm of its own, which starts
    as plain normalization, as the backbones of Swin Transformer (Liu et al., ICCV 2021) have them; the last map has the
    classifier's. Images may have any size that the stem divides: learned position embeddings are resampled to it.

    Args:
        model: from ``create_model`` or ``load``. A feature form is returned as it is.

    Returns:
        ``model``, with ``strides`` and ``widths``.
    """
    if model.strides:
        return model
    model.strides, model.widths = model.feature_layout()
    for prefix in model.head_names:
        delattr(model, prefix.rstrip("."))
    like, eps = model.norm.weight, model.norm.eps
    model.output_norms = nn.ModuleList(
        nn.LayerNorm(width, eps=eps, device=like.device, dtype=like.dtype) for width in model.widths[:-1]
    ).train(model.training)
    for module in model.modules():
        if isinstance(module, GridEmbedding):
            module.any_grid = True
    return model


def resample_grid(table: Tensor, grid: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """Resample a table of vectors to another grid: bicubic interpolation, as in DeiT's fine-tuning, along each axis.

    As two products with constant matrices, whose gradient is deterministic; that of ``F.interpolate`` is not on CUDA.

    Args:
        table: (..., N, D) with N = rows * columns of ``grid`` in row-major order.
        grid: (rows, columns) of ``table``.
        new: (rows, columns) of the result.

    Returns:
        (..., N', D).
    """
    if grid == new:
        return table
    rows, columns = (_axis_weights(*sides, table.device, table.dtype) for sides in zip(grid, new))  # (new, old) each
    maps = table.unflatten(-2, grid)  # (..., rows, columns, D)
    with torch.autocast(table.device.type, enabled=False):
        return torch.einsum("ry,cx,...yxd->...rcd", rows, columns, maps).flatten(-3, -2)


@constant_table
def _axis_weights(size: int, new: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Weights of bicubic interpolation from ``size`` to ``new`` points: (new, size)."""
    unit = torch.eye(size, dtype=torch.float64, device="cpu")[None, None]
    return F.interpolate(unit, size=(new, size), mode="bicubic", align_corners=False)[0, 0].to(device, dtype)
