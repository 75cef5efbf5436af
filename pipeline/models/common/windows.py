"""Lay a token grid out in windows, shifted or not (Liu et al., "Swin Transformer", ICCV 2021); number relative positions.

A classifier's windows tile its grid. In the feature form a grid may be of any size: it is padded to whole windows, and tokens of
the padding are connected to no others (Swin Transformer's code for detection instead mixes them in as zeros, which here would take
weight from the tokens at the border). Nearly all windows have the same connections; a map may be computed once for each kind, not
once for each window, of which an image of 800 x 1333 pixels has hundreds.
"""

from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.models.common.layers import constant_table, key_offsets

_PADDING = 2  # label of a token beyond the grid; 0: inside, 1: inside, moved to the other end by the shift


class Runs(NamedTuple):
    """Windows of equal connections: the windows of each run along the rows and along the columns. Kinds are their pairs."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]


@dataclass(frozen=True)
class Tiling:
    """Windows on a grid, padded to whole windows at the bottom and right."""

    grid: tuple[int, int]  # (rows, columns) of tokens
    window: int  # side of a window; N = window² tokens
    shifts: tuple[int, int] = (0, 0)  # offset of the first window, (down, right); the last windows wrap around

    @property
    def padded(self) -> tuple[int, int]:
        """(rows', columns') of the windows together."""
        rows, columns = self.grid
        return rows + -rows % self.window, columns + -columns % self.window

    def split(self, x: Tensor) -> Tensor:
        """(B, rows, columns, width) -> (B, windows, N, width); both windows and their tokens in row-major order."""
        below, right = (padded - size for padded, size in zip(self.padded, self.grid))
        if below or right:
            x = F.pad(x, (0, 0, 0, right, 0, below))
        if any(self.shifts):
            x = x.roll((-self.shifts[0], -self.shifts[1]), dims=(1, 2))
        (batch, rows, columns, width), window = x.shape, self.window
        x = x.view(batch, rows // window, window, columns // window, window, width).transpose(2, 3)
        return x.reshape(batch, -1, window * window, width)

    def join(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`split`: (B, windows, N, width) -> (B, rows, columns, width)."""
        (rows, columns), window = self.padded, self.window
        x = x.view(x.shape[0], rows // window, columns // window, window, window, -1).transpose(2, 3)
        x = x.reshape(x.shape[0], rows, columns, -1)
        if any(self.shifts):
            x = x.roll(self.shifts, dims=(1, 2))
        return x[:, : self.grid[0], : self.grid[1]] if self.padded != self.grid else x

    def connected(self, device: torch.device) -> Tensor | None:
        """Token pairs of a window that the image has together, not by wrapping or padding: (windows, N, N) bool; None: all."""
        return connected_tokens(self.grid, self.window, self.shifts, False, device) if self._has_regions() else None

    def connected_kinds(self, device: torch.device) -> tuple[Tensor | None, Runs | None]:
        """:meth:`connected` of each kind of window, (kinds, N, N) in row-major order of the runs; and the runs. None: all."""
        if not self._has_regions():
            return None, None
        runs = (tuple(n for _, n in _kinds(size, self.window, shift)) for size, shift in zip(self.grid, self.shifts))
        return connected_tokens(self.grid, self.window, self.shifts, True, device), Runs(*runs)

    def _has_regions(self) -> bool:
        return any(self.shifts) or self.padded != self.grid


def _kinds(size: int, window: int, shift: int) -> list[tuple[tuple[int, ...], int]]:
    """Labels of the tokens of a window along one axis, and how many windows in a row have these."""
    padded = size + -size % window
    labels = [_PADDING if (i + shift) % padded >= size else int(i >= padded - shift) for i in range(padded)]
    windows = [tuple(labels[first : first + window]) for first in range(0, padded, window)]
    return [(kind, len(list(equal))) for kind, equal in groupby(windows)]


@constant_table
def connected_tokens(
    grid: tuple[int, int], window: int, shifts: tuple[int, int], by_kind: bool, device: torch.device
) -> Tensor:
    """Which tokens of a window, or of a window of each kind, are in the same region: (windows or kinds, N, N) bool."""
    along = [_kinds(size, window, shift) for size, shift in zip(grid, shifts)]
    labels = ([kind for kind, count in kinds for _ in range(1 if by_kind else count)] for kinds in along)
    rows, columns = (torch.tensor(each, device=device) for each in labels)  # (windows or runs along the axis, window) each
    regions = (_PADDING + 1) * rows[:, None, :, None] + columns[None, :, None, :]  # (rows, columns, window, window)
    regions = regions.flatten(0, 1).flatten(1)  # (windows or kinds, N)
    return regions[:, :, None] == regions[:, None, :]


@constant_table
def relative_index(window: int, device: torch.device) -> Tensor:
    """Index of each pair of tokens into a table of all (2 window - 1)² relative positions: (N, N) integers with
    [query, key] = (y_query - y_key + window - 1) (2 window - 1) + x_query - x_key + window - 1."""
    down, right = key_offsets(window, window, device)
    return (window - 1 - down) * (2 * window - 1) + window - 1 - right
