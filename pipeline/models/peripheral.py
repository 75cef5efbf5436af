"""Peripheral position encoding Φp of PerViT (Min et al., NeurIPS 2022, Sec. 3.1, Eq. 4 to 9).

Φp(q, k) in (0, 1) says how much a query position attends to a key position, whatever the image shows.
It is a small network of the distance between the two: distances in several learned scales, a 3x3
convolution over the key's neighbours, instance norm, ReLU, another 3x3 convolution, instance norm,
sigmoid. It depends on weights alone, so a training step computes it once per layer, never per image.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NORM_EPS = 1e-5
BORDER = 2  # two unpadded 3x3 convolutions eat two positions on each side


@lru_cache(maxsize=8)
def position_distances(height: int, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Euclidean distance from every query to every key, with real distances beyond the border.

    Coordinates follow the authors' code: ``n`` points on [-1, 1] per axis, and the keys' grid goes on by
    two more steps of the same length on each side (no zero padding).

    Returns:
        (N, 1, height + 4, width + 4) with N = height * width queries in row-major order.
    """

    def axis(n: int) -> tuple[Tensor, Tensor]:
        steps = torch.arange(-BORDER, n + BORDER, device=device, dtype=torch.float64)
        keys = -1.0 + steps * (2.0 / (n - 1))
        return keys[BORDER:-BORDER], keys

    with torch.inference_mode(False):  # a cached tensor must also serve a later training step
        query_y, key_y = axis(height)
        query_x, key_x = axis(width)
        dy = (query_y[:, None] - key_y[None])[:, None, :, None]  # (H, 1, H + 4, 1)
        dx = (query_x[:, None] - key_x[None])[None, :, None, :]  # (1, W, 1, W + 4)
        distance = (dy**2 + dx**2).sqrt()  # (H, W, H + 4, W + 4)
        return distance.flatten(0, 1)[:, None].to(dtype)


class DistanceScales(nn.Module):
    """The ``channels`` learned scales of the distance, shared by all layers: R = scale * distance + offset.

    ``forward`` returns (scale, offset), (channels,) each, as copies: under ZeRO-3 the parameters are
    there only while this module runs, the copies for as long as the layers need them.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((channels, 1), -0.02))  # Supplement Eq. 3: w_r = -c1
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.weight[:, 0].clone(), self.bias.clone()


class FirstProjection(nn.Conv2d):
    """Peripheral projection PP(R; Wp1) of the scaled distances (Eq. 7), without ever building R.

    R's channels are all the same distance map times a number, so the convolution over ``channels`` maps is
    a convolution over the one map with the kernels summed: exact, and ``channels`` times less work.
    The offset is constant over the keys; the instance norm that follows removes it again.

    ``forward``: distance (N, 1, H + 4, W + 4), scale and offset (channels,) -> (N, channels, H + 2, W + 2).
    """

    def forward(self, distance: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
        kernel = torch.einsum("oiyx,i->oyx", self.weight, scale)[:, None]  # (channels, 1, 3, 3)
        bias = self.bias + torch.einsum("oiyx,i->o", self.weight, offset)  # (channels,)
        return F.conv2d(distance, kernel, bias)


class PeripheralPosition(nn.Module):
    """log Φp of one layer for all heads (Eq. 9).

    Args:
        heads: attention heads; the hidden width is ``4 * heads`` (Supplement E).
        layer, depth: choose the peripheral initialization (Eq. 10): the norm's bias runs from -5 (local) in
            the first layer to 4 (global) in the last, its weight from 3 to 0.01.
    """

    def __init__(self, heads: int, layer: int, depth: int) -> None:
        super().__init__()
        channels = 4 * heads
        self.projection1 = FirstProjection(channels, channels, 3)
        self.norm1 = nn.InstanceNorm2d(channels, eps=NORM_EPS, affine=True)
        self.projection2 = nn.Conv2d(channels, heads, 3)
        self.norm2 = nn.InstanceNorm2d(heads, eps=NORM_EPS, affine=True)
        for projection in (self.projection1, self.projection2):
            nn.init.constant_(projection.weight, 0.02)  # Supplement Eq. 3: c2
            nn.init.zeros_(projection.bias)
        nn.init.constant_(self.norm2.bias, float(torch.linspace(-5.0, 4.0, depth)[layer]))
        nn.init.constant_(self.norm2.weight, float(torch.linspace(3.0, 0.01, depth)[layer]))

    def forward(self, distance: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
        """Log of the position-based attention.

        Args:
            distance: (N, 1, H + 4, W + 4) from :func:`position_distances`.
            scale, offset: (4 * heads,) from :class:`DistanceScales`.

        Returns:
            (heads, N, N): log Φp[head, query, key], from the log-sigmoid. (The log of a rounded sigmoid
            would be -inf for the far keys of the first layers.)
        """
        # Small, and everything depends on it: full precision also under autocast.
        with torch.autocast(distance.device.type, enabled=False):
            r = self.projection1(distance, scale, offset)  # (N, 4 * heads, H + 2, W + 2)
            r = F.relu(self.norm1(r))
            r = self.norm2(self.projection2(r))  # (N, heads, H, W)
            return F.logsigmoid(r).flatten(2).transpose(0, 1)  # (heads, N, N)
