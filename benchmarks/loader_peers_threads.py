"""Contestants that decode in threads of one process: OpenCV, simplejpeg and SPDL.

None of them resizes with antialiasing as bicubic in Pillow does, which is less work. simplejpeg decodes at an eighth to the whole of the
size, the smallest at which the crop still has as many pixels as the result.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from loader_peers_pillow import Folder, random_crop
from loader_settings import FLIP, IMAGE_SIZE, MEAN, STD, Settings
from torch import Tensor

AHEAD = 4  # batches

Decode = Callable[[bytes], np.ndarray]  # a JPEG -> (IMAGE_SIZE, IMAGE_SIZE, 3) uint8


def opencv_batches(settings: Settings, interpolation: str) -> Iterator[Tensor]:
    """Batches (B, 3, 224, 224) of OpenCV; ``interpolation``: ``CUBIC`` or ``AREA``."""
    import cv2

    cv2.setNumThreads(0)  # a thread for each image is faster than threads within one

    def decode(data: bytes) -> np.ndarray:
        image = cv2.imdecode(np.frombuffer(data, dtype=np.uint8), cv2.IMREAD_COLOR_RGB)
        left, top, right, bottom = random_crop(image.shape[1], image.shape[0])
        return cv2.resize(image[top:bottom, left:right], (IMAGE_SIZE, IMAGE_SIZE), interpolation=code)

    code = getattr(cv2, f"INTER_{interpolation}")
    return _in_threads(settings, decode)


def simplejpeg_batches(settings: Settings) -> Iterator[Tensor]:
    """Batches (B, 3, 224, 224) of simplejpeg, which is libjpeg-turbo, and OpenCV's resize."""
    import cv2
    import simplejpeg

    cv2.setNumThreads(0)

    def decode(data: bytes) -> np.ndarray:
        height, width, *_ = simplejpeg.decode_jpeg_header(data)
        left, top, right, bottom = random_crop(width, height)
        least = [min(side, side * IMAGE_SIZE / part) for side, part in ((height, bottom - top), (width, right - left))]
        image = simplejpeg.decode_jpeg(data, "RGB", fastdct=True, fastupsample=True, min_height=least[0], min_width=least[1])
        y, x = image.shape[0] / height, image.shape[1] / width
        window = image[round(top * y) : max(1, round(bottom * y)), round(left * x) : max(1, round(right * x))]
        return cv2.resize(window, (IMAGE_SIZE, IMAGE_SIZE), interpolation=cv2.INTER_CUBIC)

    return _in_threads(settings, decode)


def spdl_batches(settings: Settings) -> Iterator[Tensor]:
    """Batches (B, 3, 224, 224) of SPDL's pipeline; FFmpeg decodes, crops, resizes and flips."""
    import spdl.io
    from spdl.pipeline import PipelineBuilder

    def decode(path: str) -> object:
        packets = spdl.io.demux_image(path)
        left, top, right, bottom = random_crop(packets.width, packets.height)
        flip = "hflip," if random.random() < FLIP else ""
        crop = f"crop={right - left}:{bottom - top}:{left}:{top}:exact=1"
        scale = f"scale={IMAGE_SIZE}:{IMAGE_SIZE}:flags=bicubic"
        return spdl.io.decode_packets(packets, filter_desc=f"{crop},{scale},{flip}format=pix_fmts=rgb24")

    def batch(frames: list) -> Tensor:
        return _normalized(spdl.io.to_torch(spdl.io.convert_frames(frames)))

    builder = PipelineBuilder().add_source(_endless(settings)).pipe(decode, concurrency=settings.workers)
    builder = builder.aggregate(settings.batch_size).pipe(batch).add_sink(AHEAD)
    pipeline = builder.build(num_threads=settings.workers)
    with pipeline.auto_stop():
        yield from pipeline


def _in_threads(settings: Settings, decode: Decode) -> Iterator[Tensor]:
    """Batches of images that threads read, decode and flip, ``AHEAD`` of them in advance."""

    def load(batch: np.ndarray, i: int, path: str) -> None:
        with open(path, "rb") as file:
            image = decode(file.read())
        batch[i] = image[:, ::-1] if random.random() < FLIP else image

    def start() -> tuple[np.ndarray, list]:
        batch = np.empty((settings.batch_size, IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
        return batch, [pool.submit(load, batch, i, next(paths)) for i in range(settings.batch_size)]

    paths = _endless(settings)
    with ThreadPoolExecutor(settings.workers) as pool:
        waiting = deque(start() for _ in range(AHEAD))
        while True:
            batch, loads = waiting.popleft()
            for each in loads:
                each.result()
            waiting.append(start())
            yield _normalized(torch.from_numpy(batch))


def _endless(settings: Settings) -> Iterator[str]:
    paths = [path for path, _label in Folder(settings.images.folder, None).items]
    return itertools.chain.from_iterable(map(partial(random.sample, k=len(paths)), itertools.repeat(paths)))


def _normalized(pixels: Tensor) -> Tensor:
    """(B, H, W, 3) uint8 -> (B, 3, H, W) float32."""
    mean, std = (torch.tensor([255 * value for value in values])[:, None, None] for values in (MEAN, STD))  # (3, 1, 1)
    return pixels.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format).sub_(mean).div_(std)
