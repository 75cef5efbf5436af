"""Turn decoded crops into normalized images on the CPU, multithreaded; normalize on any device.

On a CPU, DALI's bicubic resize takes longer than its decoder (2.0 and 1.3 ms per ImageNet crop). PyTorch's uint8 channels-last
kernel has the same arithmetic as Pillow's and takes 0.3 ms, so on a CPU DALI only decodes. On a GPU it does everything
(:mod:`pipeline.loader.dali_graph`).
"""

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from pipeline.augment import BatchRequest
from pipeline.augment.crop import CROP_PAD, Geometry


class Normalization:
    """(pixel / 255 - mean) / std, computed as ``pixel * scale + shift`` in float32, rounded after each operation; ``mean`` and
    ``std`` per RGB channel, of pixels in [0, 1]."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self._scale = np.array([1 / (255 * s) for s in std], dtype=np.float32)[:, None, None]  # (3, 1, 1)
        self._shift = np.array([-m / s for m, s in zip(mean, std)], dtype=np.float32)[:, None, None]
        self._constants: dict[torch.device, tuple[Tensor, Tensor]] = {}  # scale and shift on each device

    def __call__(self, pixels: Tensor) -> Tensor:
        """Normalize (B, 3, H, W) uint8 in any memory format: contiguous float32.

        On a GPU it is one asynchronous kernel on the current stream, which may round the product together with the sum.
        """
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


class _TensorPool:
    """A pool of float32 tensors of one shape; memory returns to the pool when its last tensor is garbage-collected.

    Page faults on newly allocated batches would cost more CPU time than resizing the images.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        self._free: list[np.ndarray] = []

    def take(self) -> Tensor:
        """An uninitialized tensor on the CPU."""
        memory = self._free.pop() if self._free else np.empty(self._shape, dtype=np.float32)
        # The tensor's storage, and so every tensor that shares it, keeps `handle` alive.
        handle = memory.view()
        weakref.finalize(handle, self._free.append, memory).atexit = False
        return torch.from_numpy(handle)


class Finisher:
    """Resize, crop, flip, augment, normalize, in threads; ``mean`` and ``std`` as of :class:`Normalization`."""

    def __init__(self, batch_size: int, image_size: int, mean: Sequence[float], std: Sequence[float], num_threads: int) -> None:
        self._batch_size, self._size = batch_size, image_size
        self._normalization = Normalization(mean, std)
        self._memory = _TensorPool((batch_size, 3, image_size, image_size))
        self._threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="finish")
        self.close = self._pool.shutdown

    def finish(self, crops: list[Tensor], request: BatchRequest) -> Tensor:
        """Transform B decoded windows, (h, w, 3) uint8 each: (B, 3, S, S) float32, normalized."""
        images = self._memory.take()
        output, write = images.numpy(), self._normalization.write
        self._for_each(len(crops), request, lambda i: write(self._pixels(crops[i], request, i, False), output[i]))
        return images

    def finish_pixels(self, crops: list[Tensor], request: BatchRequest, pin_memory: bool = False) -> Tensor:
        """:meth:`finish` without the normalization, for batches that are normalized on a GPU: (B, 3, S, S) uint8, channels_last.

        From page-locked memory, the copy to the GPU is asynchronous, and PyTorch reuses the memory when that is done.
        """
        images = torch.empty((self._batch_size, self._size, self._size, 3), dtype=torch.uint8, pin_memory=pin_memory)
        output = images.numpy()
        self._for_each(len(crops), request, lambda i: np.copyto(output[i], self._pixels(crops[i], request, i, True)))
        return images.permute(0, 3, 1, 2)

    def _for_each(self, count: int, request: BatchRequest, make: Callable[[int], object]) -> None:
        # An image needs Python's lock for as long if it is small: then more threads would only wait for each other.
        threads = self._threads if request.of_pixels else min(self._threads, 2 + self._size**2 // 16_000)
        list(self._pool.map(lambda thread: [make(i) for i in range(thread, count, threads)], range(threads)))

    def flip_and_augment(self, pixels: np.ndarray, request: BatchRequest, i: int, interleaved: bool = True) -> np.ndarray:
        """Flip image i of a batch, (S, S, 3) uint8, and augment it: (S, S, 3) uint8; ``pixels`` or a view of it where no
        augmentation applies and, if flipped, ``interleaved`` is false, which allows three planes in memory: they are cheaper to
        make and to normalize."""
        flip = bool(request.geometry.flip[i])
        chosen = [augmentation for augmentation in request.of_pixels if augmentation.applies(request, i)]
        if not chosen and not (flip and interleaved):
            return _mirrored(pixels) if flip else pixels
        picture = Image.fromarray(pixels)
        if flip:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)  # a third of the time that NumPy takes
        for augmentation in chosen:
            picture = augmentation.on_picture(picture, request, i)
        if interleaved:
            return np.asarray(picture)
        # A view of three planes, which convert to float32 twice as fast as pixels.
        planes = np.frombuffer(b"".join(picture.tobytes("raw", channel) for channel in "RGB"), dtype=np.uint8)
        return planes.reshape(3, picture.height, picture.width).transpose(1, 2, 0)

    def _pixels(self, crop: Tensor, request: BatchRequest, i: int, interleaved: bool) -> np.ndarray:
        bilinear = request.bilinear is not None and bool(request.bilinear[i, 0])
        pixels = resize_and_crop(crop, request.geometry, i, self._size, bilinear)
        return self.flip_and_augment(pixels, request, i, interleaved)


def _mirrored(pixels: np.ndarray) -> np.ndarray:
    """Mirror (h, w, 3) uint8 left to right: a view of a copy, or of ``pixels``, that takes as long to normalize as the original."""
    if pixels.size % 8 or not pixels.flags.c_contiguous:
        return pixels[:, ::-1]  # whose backward steps double the time of normalization
    # All bytes in reverse, eight at a time, reverse rows, columns and channels; rows and channels are put back by the view.
    backwards = pixels.reshape(-1).view(">u8")[::-1].astype("<u8").view(np.uint8)
    return backwards.reshape(pixels.shape)[::-1, :, ::-1]


def resize_and_crop(window: Tensor, geometry: Geometry, i: int, image_size: int, bilinear: bool = False) -> np.ndarray:
    """Resize and crop the decoded window (h, w, 3) uint8 of image i of a batch: (S, S, 3) uint8."""
    height, width = geometry.resize[i].astype(int).tolist()
    # (1, 3, h, w) in the layout of PyTorch's fast uint8 kernel. The batch's dimension comes first: after permute(), its stride
    # would make PyTorch take the tensor for a contiguous one, and spend a third of the time on planes as output.
    channels_last = window[None].permute(0, 3, 1, 2)
    resized = F.interpolate(channels_last, size=(height, width), mode="bilinear" if bilinear else "bicubic", antialias=True)
    pixels = resized[0].permute(1, 2, 0).numpy()  # (height, width, 3)
    if height == width == image_size and not geometry.pad_mode:
        return pixels
    pad = CROP_PAD if geometry.pad_mode else 0
    room = geometry.resize[i] + 2 * pad - image_size
    top, left = (np.rint(geometry.crop[i] * room).astype(int) - pad).tolist()
    if 0 <= top <= height - image_size and 0 <= left <= width - image_size:
        return pixels[top : top + image_size, left : left + image_size]
    padded = np.pad(pixels, ((pad, pad), (pad, pad), (0, 0)), geometry.pad_mode)  # type: ignore[call-overload]  # a mode's name
    return padded[top + pad :, left + pad :][:image_size, :image_size]
