"""Pictures for TensorBoard."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def image_grid(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...], count: int = 16) -> Tensor:
    """The first images of a batch as the model sees them, side by side in rows.

    Args:
        images: (B, 3, H, W), normalized.
        mean, std: per channel.

    Returns:
        (3, rows * H, columns * W) in [0, 1].
    """
    shown = images[:count].float().cpu()
    colours = shown * torch.tensor(std)[:, None, None] + torch.tensor(mean)[:, None, None]
    return _tile(colours.clamp(0, 1), columns=min(8, len(shown)))


@torch.no_grad()
def peripheral_maps(model: nn.Module, image_size: int) -> Tensor | None:
    """Φp of every layer (rows) and head (columns) for the query at the centre, as in Fig. 4 of the PerViT paper.

    Every process must call, in eval mode: under ZeRO-3 the parameters are gathered for it.

    Args:
        model: the model; one without Φp has no such maps.
        image_size: side of the square input in pixels.

    Returns:
        (1, layers * rows, heads * columns) in [0, 1], each pixel enlarged; or None.
    """
    if not hasattr(model, "log_phi"):
        return None
    rows, columns = model.token_grid(torch.empty(1, 3, image_size, image_size, device="meta"))
    centre = rows // 2 * columns + columns // 2
    log_phi = model.log_phi((rows, columns))
    if log_phi[0] is None:  # ablated
        return None
    maps = torch.stack([layer[:, centre] for layer in log_phi]).exp().cpu()  # (layers, heads, N)
    layers, heads, _ = maps.shape
    tiles = maps.view(layers * heads, 1, rows, columns).repeat_interleave(8, 2).repeat_interleave(8, 3)
    return _tile(torch.nn.functional.pad(tiles, (1, 1, 1, 1), value=1.0), columns=heads)


def _tile(images: Tensor, columns: int) -> Tensor:
    """(n, C, H, W) -> (C, rows * H, columns * W), row by row, black where the last row is short."""
    missing = -len(images) % columns
    images = torch.cat([images, images.new_zeros(missing, *images.shape[1:])])
    grid = images.unflatten(0, (-1, columns))  # (rows, columns, C, H, W)
    return grid.permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2)
