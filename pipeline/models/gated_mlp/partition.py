"""Lay a token grid out in windows: tiled exactly, or padded for the grids of any image size.

A classifier's windows tile its grid. In the feature form a grid may be of any size: it is padded to whole windows, and the tokens
of the padding are connected to no others (Swin Transformer's code for detection instead mixes them in as zeros, which here would
take weight from the tokens at the border). Nearly all windows have the same connections; the map is computed once for each
kind, not once for each window, of which an image of 800 x 1333 pixels has hundreds.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.models.common.layers import connected_tokens, constant_table, from_windows, to_windows

_PADDING = 2  # label of a token beyond the grid; 0: inside, 1: inside, moved to the other end by the shift


class Runs(NamedTuple):
    """Windows of equal connections: the windows of each run along the rows and along the columns. Kinds are their pairs."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]


@dataclass(frozen=True)
class Tiling:
    """Windows that tile the grid.

    Attributes:
        grid: (rows, columns) of tokens, multiples of ``window``.
        window: side of a window; N = window² tokens.
        shift: offset of the first window, down and to the right.
    """

    grid: tuple[int, int]
    window: int
    shift: int

    runs = None  # each window has a mask of its own

    def split(self, x: Tensor) -> Tensor:
        """(B, rows, columns, width) -> (B, windows, N, width)."""
        return to_windows(x, self.window, self.shift)

    def join(self, x: Tensor) -> Tensor:
        """(B, windows, N, width) -> (B, rows, columns, width)."""
        return from_windows(x, self.window, self.grid, self.shift)

    def connected(self, device: torch.device) -> Tensor | None:
        """The pairs of tokens that may mix in each window, (windows, N, N) bool; None: all."""
        return connected_tokens(self.grid, self.window, self.shift, device) if self.shift else None


class PaddedTiling:
    """Windows on a grid of any size, padded to whole windows. An axis of a single window is not shifted.

    Args:
        grid, window, shift: see :class:`Tiling`.

    Attributes:
        runs: which windows have the same connections; None: all tokens of all windows are connected.
    """

    def __init__(self, grid: tuple[int, int], window: int, shift: int) -> None:
        self.grid, self.window = grid, window
        self.shifts = tuple(shift if size > window else 0 for size in grid)
        self.padded = tuple(-(-size // window) * window for size in grid)
        rows, columns = (_kinds(size, window, shift) for size, shift in zip(grid, self.shifts))
        plain = all(len(kinds) == 1 and _PADDING not in kinds[0][0] for kinds in (rows, columns))
        self.runs = None if plain else Runs(tuple(count for _, count in rows), tuple(count for _, count in columns))

    def split(self, x: Tensor) -> Tensor:
        """(B, rows, columns, width) -> (B, windows, N, width)."""
        below, right = (padded - size for padded, size in zip(self.padded, self.grid))
        if below or right:
            x = F.pad(x, (0, 0, 0, right, 0, below))
        if any(self.shifts):
            x = x.roll(tuple(-shift for shift in self.shifts), dims=(1, 2))
        return to_windows(x, self.window)

    def join(self, x: Tensor) -> Tensor:
        """(B, windows, N, width) -> (B, rows, columns, width)."""
        rows, columns = self.padded
        x = from_windows(x, self.window, (rows, columns))
        if any(self.shifts):
            x = x.roll(self.shifts, dims=(1, 2))
        return x[:, : self.grid[0], : self.grid[1]]

    def connected(self, device: torch.device) -> Tensor | None:
        """The pairs of tokens that may mix in each kind of window, (kinds, N, N) bool; None: all."""
        if self.runs is None:
            return None
        return _connected_kinds(self.grid, self.window, (self.shifts[0], self.shifts[1]), device)


def _kinds(size: int, window: int, shift: int) -> list[tuple[tuple[int, ...], int]]:
    """Labels of the tokens of a window along one axis, and how many windows in a row have these."""
    padded = -(-size // window) * window
    labels = [_PADDING if (i + shift) % padded >= size else int(i >= padded - shift) for i in range(padded)]
    windows = [tuple(labels[first : first + window]) for first in range(0, padded, window)]
    return [(kind, len(list(equal))) for kind, equal in groupby(windows)]


@constant_table
def _connected_kinds(grid: tuple[int, int], window: int, shifts: tuple[int, int], device: torch.device) -> Tensor:
    """Which tokens of a window of each kind are in the same region: (kinds, window², window²) bool, kinds in row-major order."""
    rows, columns = (
        torch.tensor([kind for kind, _ in _kinds(size, window, shift)], device=device) for size, shift in zip(grid, shifts)
    )  # (runs, window) each
    regions = (_PADDING + 1) * rows[:, None, :, None] + columns[None, :, None, :]  # (row runs, column runs, window, window)
    regions = regions.flatten(0, 1).flatten(1)  # (kinds, window²)
    return regions[:, :, None] == regions[:, None, :]
