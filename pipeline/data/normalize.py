"""Normalization: 8-bit pixels to float32, on the device where they are.

The CPU hands batches over as uint8, a quarter of float32's bytes: they are normalized behind the copy to the GPU, or by the
thread that made the image while it is in its cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class Normalization:
    """(pixel / 255 - mean) / std, computed as ``pixel * scale + shift`` in float32, rounded after each operation.

    Args:
        mean, std: per RGB channel, of pixels in [0, 1].
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self._scale = np.array([1 / (255 * s) for s in std], dtype=np.float32)[:, None, None]  # (3, 1, 1)
        self._shift = np.array([-m / s for m, s in zip(mean, std)], dtype=np.float32)[:, None, None]
        self._constants: dict[torch.device, tuple[Tensor, Tensor]] = {}  # scale and shift on each device

    def __call__(self, pixels: Tensor, out: Tensor | None = None) -> Tensor:
        """Normalize images. Asynchronous on a GPU: one kernel, on the current stream.

        Args:
            pixels: (B, 3, H, W) uint8 in any memory format; channels_last is what :mod:`pipeline.data.cpu_transform` makes.
            out: (B, 3, H, W) float32 on the same device, in any memory format; None: a new, contiguous one.

        Returns:
            (B, 3, H, W) float32. On a GPU, the product may be rounded together with the sum, in one step.
        """
        if out is None:
            out = torch.empty(pixels.shape, dtype=torch.float32, device=pixels.device)
        if pixels.device.type == "cpu":
            for image, result in zip(pixels.permute(0, 2, 3, 1).numpy(), out.numpy()):  # (H, W, 3), (3, H, W)
                self.write(image, result)
        else:
            scale, shift = self._on(pixels.device)
            torch.addcmul(shift, pixels, scale, out=out)
        return out

    def write(self, pixels: np.ndarray, output: np.ndarray) -> None:
        """Normalize ``pixels`` (H, W, 3) uint8 into ``output`` (3, H, W) float32, in the calling thread."""
        # NumPy, because PyTorch operators would start an OpenMP team in each of our threads.
        np.copyto(output, pixels.transpose(2, 0, 1), casting="safe")
        output *= self._scale
        output += self._shift

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._constants:
            self._constants[device] = (torch.from_numpy(self._scale).to(device), torch.from_numpy(self._shift).to(device))
        return self._constants[device]
