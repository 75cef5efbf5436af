"""Partition of a token grid into non-overlapping, optionally shifted windows (Liu et al., "Swin Transformer", ICCV 2021)."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.models.common.layers import constant_table


def to_windows(x: Tensor, window: int, shift: int = 0) -> Tensor:
    """Partition a token grid into windows.

    Args:
        x: (B, rows, columns, width), rows and columns multiples of ``window``.
        window: side of a window.
        shift: offset of the first window, down and to the right; the last windows wrap around.

    Returns:
        (B, windows, window², width); both windows and their tokens in row-major order.
    """
    if shift:
        x = x.roll((-shift, -shift), dims=(1, 2))
    batch, rows, columns, width = x.shape
    x = x.view(batch, rows // window, window, columns // window, window, width).transpose(2, 3)
    return x.reshape(batch, -1, window * window, width)  # (B, windows, window², width)


def from_windows(x: Tensor, window: int, grid: tuple[int, int], shift: int = 0) -> Tensor:
    """The inverse of :func:`to_windows`: (B, windows, window², width) -> (B, rows, columns, width), ``grid`` = (rows, columns)."""
    rows, columns = grid
    x = x.view(x.shape[0], rows // window, columns // window, window, window, -1).transpose(2, 3)
    x = x.reshape(x.shape[0], rows, columns, -1)
    return x.roll((shift, shift), dims=(1, 2)) if shift else x


@constant_table
def connected_tokens(grid: tuple[int, int], window: int, shift: int, device: torch.device) -> Tensor:
    """The mask of shifted windows: which tokens of a window are adjacent in the image rather than joined by wrapping around.

    A grid that windows do not tile counts as padded at the bottom and right; padding is connected with padding alone.

    Returns:
        (windows, window², window²) bool.
    """
    sides = []
    for size in grid:
        place = torch.arange(-(-size // window) * window, device=device).roll(-shift)  # in the image, or beyond its border
        sides.append(2 * (place >= size).int() + (place < shift).int())  # padding, and what wraps around
    region = 4 * sides[0][:, None] + sides[1][None, :]  # (rows, columns)
    region = to_windows(region[None, :, :, None], window)[0, :, :, 0]  # (windows, window²)
    return region[:, :, None] == region[:, None, :]


@constant_table
def relative_index(window: int, device: torch.device) -> Tensor:
    """Index of each pair of tokens into a table of all (2 window - 1)² relative positions.

    Returns:
        (N, N) integers: [query, key] = (y_query - y_key + window - 1) (2 window - 1) + x_query - x_key + window - 1.
    """
    index = torch.arange(window * window, device=device)
    y, x = index // window, index % window  # (N,)
    rows = y[:, None] - y[None, :] + window - 1  # (N, N)
    columns = x[:, None] - x[None, :] + window - 1  # (N, N)
    return rows * (2 * window - 1) + columns
