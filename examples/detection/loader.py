"""Load image files and annotations as tensors, decoded by threads ahead of the training. Resizing is the model's part, on its device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import PIL.Image
import torch
from torch import Tensor

from examples.detection.coco import Image
from examples.detection.plan import Request
from pipeline.errors import UserError

Target = dict[str, Tensor]  # boxes (n, 4) float32 x1 y1 x2 y2, labels (n,) int64, with masks: masks (n, H, W) uint8


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
    if pixels.shape[:2] != (image.height, image.width):
        found = f"{pixels.shape[1]}x{pixels.shape[0]}"
        raise UserError(
            f"{image.file} must have {image.width}x{image.height} pixels, as its COCO file says, got {found}",
            "restore the file or correct its width and height",
        )
    return torch.from_numpy(pixels).permute(2, 0, 1)


def read_target(image: Image, masks: bool, first_label: int) -> Target:
    """What is trained on.

    Args:
        image: with n boxes.
        masks: draw the segmentations.
        first_label: of the first category: 1 where 0 is the background.
    """
    target = {
        "boxes": torch.from_numpy(image.boxes_array()),
        "labels": torch.tensor(image.labels, dtype=torch.int64) + first_label,
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


@contextmanager
def batches(
    images: list[Image],
    requests: Iterator[Request],
    masks: bool,
    first_label: int,
    threads: int,
    ahead: int,
) -> Iterator[Iterator[Batch]]:
    """The batches of ``requests``, in their order; an error of a file is raised where its batch is due.

    Args:
        images: that the requests' samples index.
        requests: one for each batch; may be endless.
        masks, first_label: see :func:`read_target`.
        threads: that decode.
        ahead: batches that are decoded before they are asked for.
    """

    def load(number: int, flip: bool) -> tuple[Tensor, Target]:
        image, target = read_image(images[number]), read_target(images[number], masks, first_label)
        return mirrored(image, target) if flip else (image, target)

    with _pool(threads) as pool:
        yield _in_order(requests, lambda each: [pool.submit(load, *pair) for pair in zip(each.sample, each.flip)], ahead)


@contextmanager
def _pool(threads: int) -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(requests: Iterator[Request], submit: Callable[[Request], list[Future]], ahead: int) -> Iterator[Batch]:
    waiting: deque[tuple[Request, list[Future]]] = deque()
    for each in requests:
        waiting.append((each, submit(each)))
        if len(waiting) > ahead:
            yield _collect(*waiting.popleft())
    while waiting:
        yield _collect(*waiting.popleft())


def _collect(request: Request, futures: list[Future]) -> Batch:
    images, targets = zip(*(future.result() for future in futures))
    return Batch(list(images), list(targets), request)
