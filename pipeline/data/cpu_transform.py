"""CPU path from decoded crops to normalized images, multithreaded.

On a CPU, DALI's bicubic resize takes longer than its decoder (2.0 and 1.3 ms per ImageNet crop). PyTorch's uint8 channels-last
kernel has the same arithmetic as Pillow's and takes 0.3 ms, so on a CPU DALI only decodes. On a GPU it does everything
(:mod:`pipeline.data.dali_graph`).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from pipeline.data.augment import randaugment_cpu
from pipeline.data.augment.crop import Geometry
from pipeline.data.augment.randaugment import fill_color
from pipeline.data.buffers import TensorPool
from pipeline.data.plan import BatchRequest


class Finisher:
    """Resize, crop, flip, RandAugment, normalize.

    Args:
        batch_size: B.
        image_size: S, side of the output.
        mean, std: per RGB channel, of pixels in [0, 1].
        num_threads: CPU threads.
    """

    def __init__(
        self,
        batch_size: int,
        image_size: int,
        mean: tuple[float, float, float],
        std: tuple[float, float, float],
        num_threads: int,
    ) -> None:
        self._size = image_size
        self._normalization = Normalization(mean, std)
        self._fill = fill_color(mean)  # RandAugment's colour outside the image
        self._memory = TensorPool((batch_size, 3, image_size, image_size))
        self._threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="finish")

    def finish(self, crops: list[Tensor], request: BatchRequest) -> Tensor:
        """Transform a batch.

        Args:
            crops: B decoded windows, (h, w, 3) uint8 each.
            request: their geometry and RandAugment operations.

        Returns:
            (B, 3, S, S) float32.
        """
        images = self._memory.take()
        output = images.numpy()

        def share(thread: int) -> None:
            for i in range(thread, len(crops), self._threads):
                self._finish_one(crops[i], request, i, output[i])

        list(self._pool.map(share, range(self._threads)))
        return images

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown()

    def _finish_one(self, crop: Tensor, request: BatchRequest, i: int, output: np.ndarray) -> None:
        pixels = resize_and_crop(crop, request.geometry, i, self._size)
        if request.geometry.flip[i]:
            pixels = pixels[:, ::-1]
        if request.ops is not None and request.ops.op[i].any():
            pixels = randaugment_cpu.apply(np.ascontiguousarray(pixels), request.ops.op[i], request.ops.amount[i], self._fill)
        self._normalization.write(pixels, output)


def resize_and_crop(window: Tensor, geometry: Geometry, i: int, image_size: int) -> np.ndarray:
    """Resize and crop one image.

    Args:
        window: (h, w, 3) uint8, the decoded window.
        geometry: of the batch.
        i: index of the image in the batch.
        image_size: S.

    Returns:
        (S, S, 3) uint8.
    """
    height, width = geometry.resize[i].astype(int).tolist()
    channels_last = window.permute(2, 0, 1)[None]  # (1, 3, h, w), the memory layout of PyTorch's fast uint8 kernel
    resized = F.interpolate(channels_last, size=(height, width), mode="bicubic", antialias=True)
    pixels = resized[0].permute(1, 2, 0).numpy()  # (height, width, 3)
    top, left = np.rint(geometry.crop[i] * (geometry.resize[i] - image_size)).astype(int).tolist()
    return pixels[top : top + image_size, left : left + image_size]


class Normalization:
    """Normalize 8-bit pixels.

    Args:
        mean, std: per RGB channel, of pixels in [0, 1].
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self._scale = np.array([1 / (255 * s) for s in std], dtype=np.float32)[:, None, None]  # (3, 1, 1)
        self._shift = np.array([-m / s for m, s in zip(mean, std)], dtype=np.float32)[:, None, None]

    def write(self, pixels: np.ndarray, output: np.ndarray) -> None:
        """Normalize ``pixels`` (S, S, 3) uint8 into ``output`` (3, S, S) float32."""
        # NumPy, because PyTorch operators would start an OpenMP team in each of our threads.
        np.copyto(output, pixels.transpose(2, 0, 1), casting="safe")
        output *= self._scale
        output += self._shift
