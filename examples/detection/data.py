"""Say which images a step takes and what is drawn for them, and load these as tensors, decoded by threads ahead of the training.

The images of the run form one sequence: position p of epoch e is sample ``sample_at(p, e)``, the epochs follow each other without a
gap, and step s takes places s * G to (s + 1) * G - 1, where G is the global batch size. So images, flips and draws are functions of
(seed, epoch, position), whatever the number of processes. Resizing is the model's part, on its device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import PIL.Image
import torch
from torch import Tensor

from examples.detection.coco import Image
from examples.detection.config import DetectionConfig
from pipeline.errors import UserError
from pipeline.stream.order import sample_at
from pipeline.stream.philox import Stream, random_words, uniforms

Target = dict[str, Tensor]  # boxes (n, 4) float32 x1 y1 x2 y2, labels (n,) int64, with masks: masks (n, H, W) uint8
_BELOW_ONE = np.float32(1 - 2.0**-24)  # the largest float32 in [0, 1)


@dataclass(frozen=True)
class Request:
    """A micro-batch of B images."""

    epoch: np.ndarray  # (B,) int64
    position: np.ndarray  # (B,) int64, in the epoch
    sample: np.ndarray  # (B,) int64, index into the images to train on
    flip: np.ndarray  # (B,) bool
    torch_seed: np.ndarray  # (B,) int64: of the generator that draws the anchors and proposals which count

    def noise(self, seed: int, count: int) -> Tensor:
        """(B, count) float32 in [0, 1): stochastic depth and dropout of the backbone."""
        drawn = uniforms(Stream.STOCHASTIC_DEPTH, seed, self.epoch, self.position, count).astype(np.float32)
        return torch.from_numpy(np.minimum(drawn, _BELOW_ONE))


def request(config: DetectionConfig, images: int, step: int, part: int, parts: int) -> Request:
    """A micro-batch.

    Args:
        images: to train on.
        step: optimizer steps before this one.
        part: which part of the step's images, 0 to ``parts`` - 1: accumulation * ranks + rank.
        parts: micro-batches of all ranks in one step.
    """
    size = config.train.global_batch_size // parts
    place = step * config.train.global_batch_size + part * size + np.arange(size)  # (B,)
    epoch, position = np.divmod(place, images)
    words = random_words(Stream.CROP_AND_FLIP, config.seed, epoch, position, 2)  # below 2**32
    return Request(
        epoch=epoch,
        position=position,
        sample=sample_at(position, epoch, images, config.seed),
        flip=words[:, 0] * 2.0**-32 < config.data.flip,
        torch_seed=words[:, 1].astype(np.int64),
    )


@dataclass
class Batch:
    """B decoded images; each has its own size."""

    images: list[Tensor]  # (3, H, W) uint8
    targets: list[Target]
    request: Request

    def to(self, device: torch.device) -> tuple[list[Tensor], list[Target]]:
        """Images in [0, 1] float32 and targets on a device, as torchvision's detectors take them."""
        images = [image.to(device, non_blocking=True).float().div_(255) for image in self.images]
        return images, [{name: value.to(device) for name, value in target.items()} for target in self.targets]


def batches(images: list[Image], requests: Iterable[Request], config: DetectionConfig, threads: int) -> Generator[Batch]:
    """The batches of endless ``requests``, in their order; an error of a file is raised where its batch is due. Close it at the end.

    Args:
        images: that the requests' samples index.
        threads: that decode, ``data.read_ahead`` batches before they are asked for.
    """
    masks = config.has_masks

    def load(number: int, flip: bool) -> tuple[Tensor, Target]:
        image, target = read_image(images[number]), read_target(images[number], masks)
        return mirrored(image, target) if flip else (image, target)

    pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")
    waiting: deque[tuple[Request, list[Future]]] = deque()
    try:
        for each in requests:
            waiting.append((each, [pool.submit(load, *pair) for pair in zip(each.sample, each.flip)]))
            if len(waiting) > config.data.read_ahead:
                due, futures = waiting.popleft()
                pixels, targets = zip(*(future.result() for future in futures))
                yield Batch(list(pixels), list(targets), due)
    finally:
        pool.shutdown(cancel_futures=True)


def read_image(image: Image) -> Tensor:
    """Decode an image: (3, H, W) uint8. EXIF orientation is ignored, as COCO's boxes do.

    Raises:
        UserError: the file cannot be decoded, or has another size than its COCO file says.
    """
    try:
        with PIL.Image.open(image.file) as opened:
            pixels = np.array(opened.convert("RGB"))  # (H, W, 3)
    except (OSError, SyntaxError, ValueError, PIL.Image.DecompressionBombError) as error:  # SyntaxError: of Pillow's PNG reader
        raise UserError(f"{image.file} cannot be decoded ({error})", "restore it") from None
    height, width, _ = pixels.shape
    if (height, width) != (image.height, image.width):
        need = f"{image.width}x{image.height} pixels, as its COCO file says"
        problem = f"{image.file} must have {need}, got {width}x{height}"
        raise UserError(problem, "restore the file or correct its width and height")
    return torch.from_numpy(pixels).permute(2, 0, 1)


def read_target(image: Image, masks: bool) -> Target:
    """What is trained on; with ``masks`` the segmentations too, and label 0 is the background."""
    target = {
        "boxes": torch.tensor(image.boxes, dtype=torch.float32).reshape(-1, 4),
        "labels": torch.tensor(image.labels, dtype=torch.int64) + masks,
    }
    if masks:
        drawn = [draw_mask(segmentation, image.height, image.width) for segmentation in image.segmentations]
        target["masks"] = torch.from_numpy(np.stack(drawn))  # (n, H, W)
    return target


def draw_mask(segmentation: list | dict, height: int, width: int) -> np.ndarray:
    """Polygons or run lengths as (H, W) uint8, 1 within."""
    from pycocotools import mask

    if isinstance(segmentation, dict) and isinstance(segmentation["counts"], str):
        return mask.decode(segmentation)
    encoded = mask.frPyObjects(segmentation, height, width)
    return mask.decode(mask.merge(encoded) if isinstance(encoded, list) else encoded)


def mirrored(image: Tensor, target: Target) -> tuple[Tensor, Target]:
    """An image (3, H, W) and its target, flipped horizontally."""
    width = image.shape[-1]
    x1, y1, x2, y2 = target["boxes"].unbind(1)
    flipped = {**target, "boxes": torch.stack([width - x2, y1, width - x1, y2], dim=1)}
    if "masks" in target:
        flipped["masks"] = target["masks"].flip(-1)
    return image.flip(-1), flipped
