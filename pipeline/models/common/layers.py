"""Share layers and helpers between the model families: MLP, dropout, initialization, typed module lists, constant tables, and the
partition of a token grid into windows (Liu et al., "Swin Transformer", ICCV 2021)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Generic, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class MLP(nn.Module):
    """Linear, GELU, Linear: the feed-forward part of a transformer block.

    ``forward``: (..., width) -> (..., out_width).
    """

    def __init__(self, width: int, hidden: int, out_width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, out_width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


def drop_path_scales(rates: Tensor, noise: Tensor) -> Tensor:
    """Stochastic-depth factors (Huang et al., ECCV 2016).

    Args:
        rates: (branches,) drop probabilities.
        noise: (B, branches) uniform numbers in [0, 1).

    Returns:
        (B, branches): 0 for dropped branches, ``1 / (1 - rate)`` for kept ones.
    """
    keep = 1.0 - rates
    return (noise >= rates).to(keep.dtype) / keep


def drop_elements(x: Tensor, rate: float, noise: Tensor) -> Tensor:
    """Dropout (Srivastava et al., JMLR 2014) whose mask is a hash of one random number per sample and the element's index.

    The mask of a sample is thus independent of its batch and reproduced by recomputation, without a random tensor as large as
    ``x``. Costs about a dozen integer operations per element.

    Args:
        x: (B, ...).
        rate: probability that an element becomes 0; the others are divided by ``1 - rate``.
        noise: (B,) uniform numbers in [0, 1), of which the leading 24 bits (float32's precision) are used.

    Returns:
        Same shape and dtype as ``x``.
    """
    with torch.no_grad():
        places = _hash(torch.arange(x[0].numel(), dtype=torch.int32, device=x.device))  # (elements,)
        seeds = _hash((noise * 2**24).to(torch.int32))  # (B,)
        words = _hash(places ^ seeds[:, None])  # (B, elements), uniform over int32
        dropped = (words < round((rate - 0.5) * 2**32)).view(x.shape)
    return x.masked_fill(dropped, 0.0) * (1 / (1 - rate))


def _hash(words: Tensor) -> Tensor:
    """Integer hash, bijective on int32, in place: xorshift-multiply with constants found by search (Wellons, lowbias32)."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        words ^= (words >> shift) & (2 ** (32 - shift) - 1)  # arithmetic shift, masked to a logical one
        words *= factor
    return words.bitwise_xor_((words >> 15) & 0x1FFFF)


def init_linear(module: nn.Module, std: float = 0.02) -> None:
    """ViT's and DeiT's initialization of a linear layer: truncated normal weight, zero bias. Other modules are left alone."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=std)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


Element = TypeVar("Element", bound=nn.Module)

if TYPE_CHECKING:

    class ModuleList(nn.ModuleList, Generic[Element]):
        """What the type checker sees of ``nn.ModuleList``."""

        def __init__(self, modules: Iterable[Element]) -> None: ...

        def __iter__(self) -> Iterator[Element]: ...

        @overload
        def __getitem__(self, idx: slice) -> ModuleList[Element]: ...

        @overload
        def __getitem__(self, idx: int) -> Element: ...

        def __getitem__(self, idx: int | slice) -> Element | ModuleList[Element]: ...

else:
    ModuleList = nn.ModuleList


Table = TypeVar("Table", bound=Callable[..., Tensor])
_SIZES = 16  # tables of a function that are kept: a model has a handful of grids and windows
_tables: list[Callable[..., Tensor]] = []
_caches: list[Callable[[], None]] = []  # what empties the cache of each table
_keeps_fakes = False


def constant_table(compute: Table) -> Table:
    """Decorator: compute a table once for each combination of arguments, which are hashable.

    The tensor is not an inference tensor even if the first call is one of inference mode: it must serve a later training step.
    Nor is a fake tensor kept, which has no values: ``torch.export`` and the compiler call a model with such.
    """

    @lru_cache(maxsize=_SIZES)
    def computed(*arguments: object, **named: object) -> Tensor:
        with torch.inference_mode(False):
            return compute(*arguments, **named)

    @wraps(compute)
    def table(*arguments: object, **named: object) -> Tensor:
        found = computed(*arguments, **named)
        if type(found) is not Tensor and not _keeps_fakes:
            computed.cache_clear()
        return found

    _tables.append(table)
    _caches.append(computed.cache_clear)
    return table  # type: ignore[return-value]  # the signature of compute


@contextmanager
def keep_fake_tables() -> Iterator[None]:
    """In the block, fake tensors are kept too, so that a trace of a step computes each table once, as a run does."""
    global _keeps_fakes
    try:
        for empty in _caches:
            empty()
        _keeps_fakes = True
        yield
    finally:
        _keeps_fakes = False
        for empty in _caches:
            empty()


def compile_tables_as_constants() -> None:
    """Let ``torch.compile`` take the tables as constants. It ignores caches, and would compute them in every step."""
    for table in _tables:
        torch.compiler.assume_constant_result(table)  # here because it imports the compiler, which takes a second


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
