"""Peripheral position encoding Φp of PerViT (Min et al., NeurIPS 2022, Sec. 3.1, Eq. 4 to 9).

Φp(q, k) in (0, 1) is the position-based attention of a query to a key, independent of the image. It is a small network of their
distance: learned scales of the distance, a 3x3 convolution over the key's neighbours, instance norm, ReLU, another 3x3
convolution, instance norm, sigmoid. It depends on parameters only and is computed once per layer and forward pass
(:mod:`pipeline.models.pervit.phi_model`). :class:`PhiDesign` holds the variants of Table 5.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.errors import UserError
from pipeline.models.common.layers import as_written, constant_table

NORM_EPS = 1e-5  # of the published code
# Peripheral initialization: bias and weight of the last norm, in the first and in the last layer (Sec. 3.1, after Eq. 9).
NORM_BIAS = (-5.0, 4.0)
NORM_WEIGHT = (3.0, 0.01)


@dataclass(frozen=True)
class PhiDesign:
    """Architecture (Table 5, bottom) and initialization (Table 5, top) of Φp; the defaults are the published model."""

    distance: Literal["euclidean", "learned"] = "euclidean"  # Euc: between coordinates; Lrn: LearnedVectors
    neighbours: bool = True  # N: 3x3 kernels over the key's neighbours; False: 1x1
    layers: Literal[1, 2] = 2  # ML: projection, norm, ReLU, projection, norm; 1: a single projection to the heads and its norm
    init: Literal["peripheral", "conv", "random"] = "peripheral"  # see PeripheralPosition

    @property
    def border(self) -> int:
        """Key positions beyond each side of the grid: one per unpadded 3x3 convolution."""
        return self.layers if self.neighbours else 0


PUBLISHED = PhiDesign()


@constant_table
def position_distances(height: int, width: int, device: torch.device, dtype: torch.dtype, border: int = 2) -> Tensor:
    """Euclidean distance from every query to every key, including keys beyond the border.

    Coordinates follow the authors' code: ``n`` points on [-1, 1] per axis; the grid of the keys extends by ``border`` steps of
    the same length on each side, so that the convolutions see true distances instead of zero padding. Returns
    (N, 1, height + 2 * border, width + 2 * border) with N = height * width queries in row-major order.
    """

    def axis(n: int) -> tuple[Tensor, Tensor]:
        steps = torch.arange(-border, n + border, device=device, dtype=torch.float64)
        keys = -1.0 + steps * (2.0 / (n - 1))
        return keys[border : border + n], keys

    query_y, key_y = axis(height)
    query_x, key_x = axis(width)
    dy = (query_y[:, None] - key_y[None])[:, None, :, None]  # (H, 1, H + 2 * border, 1)
    dx = (query_x[:, None] - key_x[None])[None, :, None, :]  # (1, W, 1, W + 2 * border)
    distance = (dy**2 + dx**2).sqrt()  # (H, W, H + 2 * border, W + 2 * border)
    return distance.flatten(0, 1)[:, None].to(dtype)


class LearnedVectors(nn.Module):
    """Distances between learned vectors instead of coordinates (Lrn in Table 5), shared by all layers.

    The paper says "relative distances between learnable vectors (R in HW x HW x Dr)". Our reading: every position has a learned
    vector of Dr channels, and the distance in channel r is |v_q,r - v_k,r|. Scales, the extended grid, projections and norms
    are unchanged. The vectors are initialized uniformly on [-1, 1], the range of the coordinates, without spatial structure.

    ``forward``: grid, the (rows, columns) that the vectors were created for -> distances from every query to every key,
    (N, channels, rows + 2 * border, columns + 2 * border).
    """

    def __init__(self, channels: int, grid: tuple[int, int], border: int) -> None:
        super().__init__()
        self.grid, self.border = grid, border
        self.weight = nn.Parameter(torch.empty(channels, grid[0] + 2 * border, grid[1] + 2 * border))
        nn.init.uniform_(self.weight, -1.0, 1.0)

    def forward(self, grid: tuple[int, int]) -> Tensor:
        if grid != self.grid:
            learned = f"model.switches.phi_p_distance=learned has vectors for {self.grid[0]} x {self.grid[1]}"
            problem = f"the image gives {grid[0]} x {grid[1]} tokens, but {learned}"
            raise UserError(problem, "use images of model.image_size, or phi_p_distance=euclidean")
        rows, columns = grid
        queries = self.weight[:, self.border : self.border + rows, self.border : self.border + columns]
        queries = queries.flatten(1).transpose(0, 1)  # (N, channels)
        return (queries[:, :, None, None] - self.weight).abs()  # (N, channels, rows + 2 * border, columns + 2 * border)


class DistanceScales(nn.Module):
    """Learned scales of the distance, shared by all layers: R = scale * distance + offset, ``channels`` of each.

    ``forward`` returns copies of (scale, offset), (channels,) each: ZeRO-3 releases the parameters when this module's forward
    ends, before the layers have used them.
    """

    def __init__(self, channels: int, init: Literal["peripheral", "conv", "random"] = "peripheral") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((channels, 1), -0.02))  # Supplement Eq. 3: w_r = -c1, c1 = 0.02
        self.bias = nn.Parameter(torch.zeros(channels))
        if init == "random":
            nn.init.uniform_(self.weight, -1.0, 1.0)  # PyTorch's initialization of Linear(1, channels)
            nn.init.uniform_(self.bias, -1.0, 1.0)

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.weight[:, 0].clone(), self.bias.clone()  # (channels,) each


class FirstProjection(nn.Conv2d):
    """Peripheral projection PP(R; Wp1) of the scaled distances (Eq. 7), without materializing R.

    With Euclidean distances all channels of R are multiples of one map, so that convolving them equals convolving that map with
    the weighted sum of the kernels: exact, with ``channels`` times fewer operations. The offset is constant over the keys, and
    the instance norm that follows removes it.

    ``forward``: distance (N, 1 or channels, H', W'), scale and offset (channels,) -> (N, out, H' - 2, W' - 2), or
    (N, out, H', W') with a 1x1 kernel.
    """

    bias: nn.Parameter  # never None here

    def forward(  # type: ignore[override]  # the input is the map with its scales
        self, distance: Tensor, scale: Tensor, offset: Tensor
    ) -> Tensor:
        return F.conv2d(distance, *scaled(distance, scale, offset, self.weight, self.bias))


def scaled(distance: Tensor, scale: Tensor, offset: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Kernel (out, 1 or channels, k, k) and bias (out,) by which the distances themselves are convolved, for weight
    (out, channels, k, k) and bias (out,) of one :class:`FirstProjection`, or of several together."""
    one_map = distance.shape[1] == 1
    kernel = torch.einsum("oiyx,i->oyx", weight, scale)[:, None] if one_map else weight * scale[:, None, None]
    return kernel, bias + torch.einsum("oiyx,i->o", weight, offset)


class PeripheralPosition(nn.Module):
    """log Φp of one layer for all heads (Eq. 9).

    Instance norm follows every projection in every design, as in Eq. 8; the initializations act through the last one.

    Args:
        heads: attention heads; the hidden width is ``4 * heads`` (Supplement E).
        layer, depth: position of the layer, for the initialization. ``design.init`` "peripheral" (after Eq. 9): the last norm's
            bias goes linearly from -5 (local) in the first layer to 4 (global) in the last, its weight from 3 to 0.01.
            "conv": -5 and 3 in all layers. "random": all parameters; the paper does not name the distribution. Projections
            keep PyTorch's initialization, weights and biases of the norms are drawn from N(0, 1).
    """

    def __init__(self, heads: int, layer: int, depth: int, design: PhiDesign = PUBLISHED) -> None:
        super().__init__()
        self.layers = design.layers
        channels, kernel = 4 * heads, 3 if design.neighbours else 1
        hidden = channels if design.layers == 2 else heads
        self.projection1 = FirstProjection(channels, hidden, kernel)
        self.norm1 = nn.InstanceNorm2d(hidden, eps=NORM_EPS, affine=True)
        if design.layers == 2:
            self.projection2 = nn.Conv2d(hidden, heads, kernel)
            self.norm2 = nn.InstanceNorm2d(heads, eps=NORM_EPS, affine=True)
        if design.init == "random":
            self._randomize()
        else:
            self._start_at(0 if design.init == "conv" else layer, depth)

    def _randomize(self) -> None:
        for name, parameter in self.named_parameters():
            if name.startswith("norm"):
                nn.init.normal_(parameter)

    def _start_at(self, layer: int, depth: int) -> None:
        for name, parameter in self.named_parameters():
            if name.startswith("projection"):
                nn.init.constant_(parameter, 0.02 if parameter.ndim > 1 else 0.0)  # Supplement Eq. 3: c2; biases
        last = self.norm2 if self.layers == 2 else self.norm1
        for parameter, ends in ((last.bias, NORM_BIAS), (last.weight, NORM_WEIGHT)):
            nn.init.constant_(parameter, float(torch.linspace(*ends, depth, device="cpu")[layer]))

    def forward(self, distance: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
        """Log of the position-based attention, as log-sigmoid: the log of a sigmoid would underflow to -inf for distant keys in
        the first layers. Returns (heads, N, N): log Φp[head, query, key].

        Args:
            distance: (N, 1 or 4 * heads, H + 2 * border, W + 2 * border) of :func:`position_distances`, :class:`LearnedVectors`.
            scale, offset: (4 * heads,) from :class:`DistanceScales`.
        """
        # Full precision even under autocast: the maps are small, and their rounding error would affect every image.
        with as_written(distance):
            r = self.norm1(self.projection1(distance, scale, offset))  # (N, 4 * heads, H + 2, W + 2)
            if self.layers == 2:
                r = self.norm2(self.projection2(F.relu(r)))  # (N, heads, H, W)
            return F.logsigmoid(r).flatten(2).transpose(0, 1)  # (heads, N, N)
