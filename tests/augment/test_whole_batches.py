"""Erasing and mixing as a GPU does them, whole batches at once: the same pixels as image by image, in a handful of operations."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.augment import BatchRequest, erasing, mixing
from pipeline.augment.crop import eval_geometry
from pipeline.loader.loader import augmented

WITHOUT_KERNEL = (
    "view",
    "slice",
    "select",
    "unsqueeze",
    "split",
    "detach",
    "alias",
    "empty",
    "lift_fresh",
)  # no work on the device


class CountKernels(TorchDispatchMode):
    """Counts PyTorch's operators that start work on the device; a few of them start two or three kernels on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if not name.startswith(WITHOUT_KERNEL):
            self.operators[name] += 1
        return function(*args, **(kwargs or {}))


def request_of(batch: int, size: int, seed: int, erased: float = 0.25, mixup: float = 0.8, cutmix: float = 1.0) -> BatchRequest:
    rng = np.random.default_rng(seed)
    index = np.arange(batch)
    erase, mix = erasing.RandomErasing(erased, size), mixing.MixupCutmix(mixup, cutmix, 0.5, 8, size)
    return BatchRequest(
        index=index,
        label=rng.integers(0, 1000, batch),
        epoch=index,
        position=index,
        valid=index > 0,
        geometry=eval_geometry(index + 10, index + 20, size, 0.875),
        draws={
            erase: erase.sample(rng.random((batch, erasing.UNIFORMS_PER_SAMPLE))),
            mix: mix.sample(rng.random((batch // 8, mixing.UNIFORMS_PER_GROUP)), 1),
        },
    )


@pytest.mark.parametrize(
    ("batch", "size", "erased", "mixup", "cutmix"),
    [
        (32, 64, 0.25, 0.8, 1.0),
        (16, 37, 1.0, 0.0, 1.0),
        (16, 33, 1.0, 0.8, 0.0),
        (128, 5, 0.5, 0.8, 1.0),
        (8, 32, 0.0, 0.8, 1.0),
    ],
)
def test_whole_batches_get_the_pixels_of_single_images(
    batch: int, size: int, erased: float, mixup: float, cutmix: float
) -> None:
    """Guards against a GPU that trains on other noise, other boxes or other mixtures than a CPU, by a single bit."""
    for seed in range(3):
        request = request_of(batch, size, seed, erased, mixup, cutmix)
        images = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(seed))
        whole = images.clone()
        ours, expected = augmented(whole, request, at_once=True), augmented(images, request)
        assert ours.images is whole
        for name in ("images", "labels", "other_labels", "weight", "valid"):
            assert torch.equal(getattr(ours, name), getattr(expected, name)), (name, seed)


def test_noise_is_what_each_image_drew_alone() -> None:
    """Guards against noise that depends on an image's neighbours, and so on the number of processes; pinned since the first run."""
    erased = request_of(32, 64, 0, erased=0.6).drawn(erasing.RandomErasing)
    noise = erasing.erasing_noise(erased, 3)
    end = 0
    for (_, _, height, width), seed in zip(erased.box.tolist(), erased.noise_seed.tolist()):
        begin, end = end, end + 3 * height * width
        alone = torch.empty(3, height, width)
        if height:
            alone.normal_(generator=torch.Generator().manual_seed(seed))
        assert torch.equal(noise[begin:end].view(3, height, width), alone)
    assert end == len(noise)


def test_a_batch_takes_a_handful_of_operations() -> None:
    """Guards against operations per image or group: on a GPU, starting the 130 of them takes longer than what they do."""
    few, many = Counter(), Counter()
    for batch in (128, 256):
        request = request_of(batch, 32, 0)
        images = torch.randn(batch, 3, 32, 32)
        with CountKernels() as single:
            for augmentation in request.draws:
                augmentation.apply_(images, request)
        with CountKernels() as whole:
            augmented(images, request, at_once=True)
        whole.operators.pop("normal_")  # on the CPU, whatever the device
        few[batch], many[batch] = whole.operators.total(), single.operators.total()
    assert few[256] == few[128] <= 8, whole.operators
    assert many[128] > 90, single.operators
