"""Share between the families: MLP, dropout, checks of sizes, initialization, typed module lists, constant tables, resampling."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.errors import UserError
from pipeline.kernels.peripheral import aligned_width

PATCH = 16  # side of a patch in pixels
NORM_EPS = 1e-6


def computed_in(device: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a linear layer's product: autocast's, where it is on."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else dtype


def as_written(like: Tensor) -> AbstractContextManager:
    """No autocast on the device of ``like``: operators compute in the dtypes of their tensors."""
    device = like.device.type
    return nullcontext() if device == "meta" else torch.autocast(device, enabled=False)  # PyTorch has no autocast for meta


class _Corner(torch.autograd.Function):
    """``values`` in the first corner of zeros of a shape, in a dtype. The gradient of the zeros is dropped.

    Two kernels forward and one backward, casts included; ``pad`` and autocast would start three and two.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        ctx.corner, ctx.dtype = tuple(slice(size) for size in values.shape), values.dtype
        larger = values.new_zeros(shape, dtype=dtype)
        larger[ctx.corner].copy_(values)
        return larger

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[ctx.corner].to(ctx.dtype), None, None


def with_zeros(values: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """``values`` in ``dtype``, and zeros after it on each axis up to ``shape``."""
    return values.to(dtype) if [*values.shape] == [*shape] else _Corner.apply(values, shape, dtype)


def aligned_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear``, with rows of a multiple of 16 bytes where a GPU multiplies in bf16 or fp16.

    cuBLAS has slow kernels for rows that begin anywhere: on an H200 the products of PerViT-M's widths of 468, 540 and 684 channels
    take three to four times as long as with zeros up to 472, 544 and 688.
    """
    outputs, inputs = weight.shape
    wide, high = (aligned_width(size, x.device) for size in (inputs, outputs))
    if (wide, high) == (inputs, outputs) or (dtype := computed_in(x.device.type, weight.dtype)).itemsize != 2:
        return F.linear(x, weight, bias)
    x = with_zeros(x, [*x.shape[:-1], wide], dtype)
    if bias is not None:
        bias = with_zeros(bias, [high], dtype)
    return F.linear(x, with_zeros(weight, [high, wide], dtype), bias)[..., :outputs]


class AlignedLinear(nn.Linear):
    """A linear layer computed by :func:`aligned_product`: parameters and checkpoints are those of ``nn.Linear``."""

    def forward(self, x: Tensor) -> Tensor:
        return aligned_product(x, self.weight, self.bias)


class HeadLinear(AlignedLinear):
    """A linear layer to heads, or from them (``axis`` 1), that lie ``aligned_width`` channels apart where attention reads them.

    Called without ``head_dim`` it is its base class.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = True, axis: int = 0) -> None:
        super().__init__(inputs, outputs, bias)
        self.axis = axis

    def forward(self, x: Tensor, head_dim: int | None = None) -> Tensor:
        if head_dim is None or (width := aligned_width(head_dim, x.device)) == head_dim:
            return super().forward(x)
        dtype = computed_in(x.device.type, self.weight.dtype)
        weight: Tensor = self.weight.unflatten(self.axis, (-1, head_dim))
        bias: Tensor | None = self.bias
        shape = [*weight.shape]
        shape[self.axis + 1] = width
        weight = with_zeros(weight, shape, dtype).flatten(self.axis, self.axis + 1)
        if bias is not None and self.axis == 0:
            bias = with_zeros(bias.unflatten(0, (-1, head_dim)), shape[:2], dtype).flatten()
        return aligned_product(x, weight, bias)


class MLP(nn.Module):
    """Linear, GELU, Linear: the feed-forward part of a transformer block. ``forward``: (..., width) -> (..., out_width)."""

    def __init__(self, width: int, hidden: int, out_width: int) -> None:
        super().__init__()
        self.fc1 = AlignedLinear(width, hidden)
        self.fc2 = AlignedLinear(hidden, out_width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


def drop_elements(x: Tensor, rate: float, noise: Tensor) -> Tensor:
    """Dropout (Srivastava et al., JMLR 2014) whose mask is a hash of one random number per sample and the element's index.

    The mask of a sample is thus independent of its batch and reproduced by recomputation, without a random tensor as large as
    ``x``. Costs about a dozen integer operations per element.

    Args:
        x: (B, ...), also the shape of the result.
        rate: probability that an element becomes 0; the others are divided by ``1 - rate``.
        noise: (B,) uniform numbers in [0, 1), of which the leading 24 bits (float32's precision) are used.
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


def check_sides(sides: Iterable[int], unit: int, least: int | None = None, of_images: bool = False) -> None:
    """Raise a UserError unless sides of images, or ``model.image_size``, are multiples of ``unit`` and at least ``least``."""
    least = least or unit
    for side in sides:
        if side % unit or side < least:
            near = max(least, round(side / unit) * unit)
            what = "a side of an image" if of_images else "model.image_size"
            remedy = f"pad or resize the images, for example to {near}" if of_images else f"set it to {near}"
            raise UserError(f"{what} must be a multiple of {unit} and at least {least}, got {side}", remedy)


def check_size(images: Tensor, side: int) -> None:
    """Raise a UserError unless images (B, 3, H, W) have the size that a model with weights for each position was built for."""
    height, width = images.shape[-2:]
    if height != side or width != side:
        built = f"the model was built for {side} x {side} pixels, with weights for each position"
        remedy = "set model.image_size to the size of the images, or resize them"
        raise UserError(f"an image has {height} x {width} pixels, but {built}", remedy)


def init_linear(module: nn.Module, convolutions: bool = False) -> None:
    """ViT's and DeiT's initialization of a linear layer: truncated normal weight, zero bias; also of ``convolutions``, as in PosMLP's
    and LSAT's published code. Other modules are left alone."""
    if isinstance(module, nn.Linear) or (convolutions and isinstance(module, nn.Conv2d)):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


Element = TypeVar("Element", bound=nn.Module)

if TYPE_CHECKING:

    class ModuleList(nn.ModuleList, Generic[Element]):
        """What the type checker sees of ``nn.ModuleList``."""

        def __init__(self, modules: Iterable[Element]) -> None: ...

        def __iter__(self) -> Iterator[Element]: ...

        def __getitem__(self, idx: int) -> Element: ...  # type: ignore[override]  # nobody slices

else:
    ModuleList = nn.ModuleList


Table = TypeVar("Table", bound=Callable[..., Tensor])
_SIZES = 16  # tables of a function that are kept: a model has a handful of grids and windows
_tables: dict[Callable[..., Tensor], Callable[[], None]] = {}  # and what empties the cache of each
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

    _tables[table] = computed.cache_clear
    return table  # type: ignore[return-value]  # the signature of compute


@contextmanager
def keep_fake_tables() -> Iterator[None]:
    """In the block, fake tensors are kept too, so that a trace of a step computes each table once, as a run does."""
    global _keeps_fakes
    _empty_caches()
    _keeps_fakes = True
    try:
        yield
    finally:
        _keeps_fakes = False
        _empty_caches()


def _empty_caches() -> None:
    for empty in _tables.values():
        empty()


def compile_tables_as_constants() -> None:
    """Let ``torch.compile`` take the tables as constants. It ignores caches, and would compute them in every step."""
    for table in _tables:
        torch.compiler.assume_constant_result(table)  # here because it imports the compiler, which takes a second


def key_offsets(rows: int, columns: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Tokens down and right from every query to every key of a grid, in row-major order: (N, N) int64 each, [query, key]."""
    axes = (torch.arange(size, device=device) for size in (rows, columns))
    y, x = (axis.flatten() for axis in torch.meshgrid(*axes, indexing="ij"))  # (N,)
    return y[None, :] - y[:, None], x[None, :] - x[:, None]


def resample_grid(table: Tensor, grid: tuple[int, int], new: tuple[int, int], extra_tokens: int = 0) -> Tensor:
    """Resample a table of vectors to another grid: bicubic interpolation, as in DeiT's fine-tuning, along each axis.

    As two products with constant matrices, whose gradient is deterministic; that of ``F.interpolate`` is not on CUDA.

    Args:
        table: (..., N, D) with N = rows * columns of ``grid`` in row-major order, after those of ``extra_tokens``, which stay.
        grid, new: (rows, columns) of ``table`` and of the result, (..., N', D).
    """
    if grid == new:
        return table
    if extra_tokens:
        patches = resample_grid(table[..., extra_tokens:, :], grid, new)
        return torch.cat([table[..., :extra_tokens, :], patches], dim=-2)
    rows, columns = (_axis_weights(*sides, table.device, table.dtype) for sides in zip(grid, new))  # (new, old) each
    maps = table.unflatten(-2, grid)  # (..., rows, columns, D)
    with as_written(table):
        return torch.einsum("ry,cx,...yxd->...rcd", rows, columns, maps).flatten(-3, -2)


@constant_table
def _axis_weights(size: int, new: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Weights of bicubic interpolation from ``size`` to ``new`` points: (new, size)."""
    unit = torch.eye(size, dtype=torch.float64, device="cpu")[None, None]
    return F.interpolate(unit, size=(new, size), mode="bicubic", align_corners=False)[0, 0].to(device, dtype)
