"""Contestants that decode with Pillow in worker processes: a folder behind torch's DataLoader, and webdataset.

The first is the pipeline of timm's users: torchvision's transforms (``RandomResizedCrop``, ``RandomHorizontalFlip``,
``ToTensor``, ``Normalize``) written out with the same calls to Pillow and torch. The full recipe takes RandAugment, random
erasing, Mixup and CutMix from timm itself.
"""

from __future__ import annotations

import importlib.util
import math
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from loader_settings import CROP_RATIO, CROP_SCALE, FLIP, IMAGE_SIZE, MEAN, STD, Settings, Unavailable, jpegs_of
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

ENDLESS = 100_000_000  # images per epoch: practically infinite, so that workers never restart
SHUFFLE_BUFFER = 256  # samples in memory per webdataset worker


def random_crop(width: int, height: int) -> tuple[int, int, int, int]:
    """Pillow's box (left, upper, right, lower) of torchvision's ``RandomResizedCrop.get_params``."""
    for _ in range(10):
        area = height * width * random.uniform(*CROP_SCALE)
        ratio = math.exp(random.uniform(*map(math.log, CROP_RATIO)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = random.randint(0, width - w), random.randint(0, height - h)
            return left, top, left + w, top + h
    low, high = CROP_RATIO
    w = min(width, round(height * high))
    h = min(height, round(width / low))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


class CropFlip:
    """Random resized crop, antialiased bicubic, and flip. The augmentation in between is for the full recipe."""

    def __init__(self, augment: Callable[[Image.Image], Image.Image] | None, erase: Callable[[Tensor], Tensor] | None) -> None:
        self.augment = augment
        self.erase = erase
        self.mean = torch.tensor(MEAN)[:, None, None]  # (3, 1, 1)
        self.std = torch.tensor(STD)[:, None, None]

    def __call__(self, image: Image.Image) -> Tensor:
        """RGB image -> (3, H, W) float32, normalized."""
        image = image.crop(random_crop(*image.size)).resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC)
        if random.random() < FLIP:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if self.augment:
            image = self.augment(image)
        pixels = torch.from_numpy(np.array(image))  # (H, W, 3) uint8
        tensor = pixels.permute(2, 0, 1).contiguous().to(torch.float32).div(255)  # ToTensor
        tensor.sub_(self.mean).div_(self.std)  # Normalize
        return self.erase(tensor) if self.erase else tensor


class Folder(Dataset):
    """The images ``<class>/*.JPEG`` of a folder, as torchvision's ``ImageFolder`` opens them."""

    def __init__(self, folder: Path, transform: Callable[[Image.Image], Tensor] | None) -> None:
        classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
        self.items = [(str(path), label) for label, name in enumerate(classes) for path in jpegs_of(folder / name)]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.items[index]
        with open(path, "rb") as file:
            return self.transform(Image.open(file).convert("RGB")), label


def folder_batches(settings: Settings, full: bool) -> Iterator[Tensor]:
    """Batches (B, 3, 224, 224) of a folder, through torch's DataLoader.

    Args:
        full: RandAugment, random erasing, Mixup and CutMix as well, as timm does them without its GPU prefetcher.

    Raises:
        Unavailable: the full recipe needs timm, which is not there.
    """
    transform, mixup = _full_recipe(settings.timm) if full else (CropFlip(augment=None, erase=None), None)
    dataset = Folder(settings.images.folder, transform)
    sampler = RandomSampler(dataset, num_samples=ENDLESS // len(dataset) * len(dataset))
    loader = DataLoader(
        dataset, settings.batch_size, sampler=sampler, num_workers=settings.workers, worker_init_fn=_seed, drop_last=True
    )
    for images, labels in loader:
        yield mixup(images, labels)[0] if mixup else images


def webdataset_batches(settings: Settings) -> Iterator[Tensor]:
    """Batches (B, 3, 224, 224) of tars, through webdataset and its loader."""
    import webdataset

    tars = sorted(map(str, settings.images.shards.glob("*.tar")))
    dataset = (
        webdataset.WebDataset(tars, resampled=True, shardshuffle=False)  # resampled: an endless stream, no worker restarts
        .shuffle(SHUFFLE_BUFFER)
        .decode("pilrgb")
        .to_tuple("jpg", "cls")
        .map_tuple(CropFlip(augment=None, erase=None), None)
        .batched(settings.batch_size, partial=False)
    )
    loader = webdataset.WebLoader(dataset, batch_size=None, num_workers=settings.workers, worker_init_fn=_seed)
    for images, _labels in loader:
        yield images


def _seed(worker: int) -> None:
    random.seed(torch.initial_seed())  # PyTorch seeds a worker's random and NumPy; webdataset's own loader seeds neither
    np.random.seed(torch.initial_seed() % 2**32)


def _full_recipe(folder: Path | None) -> tuple[CropFlip, Callable]:
    """The transform of one image, and Mixup / CutMix of a batch: DeiT's recipe with timm's own code."""
    auto_augment = _timm_module(folder, "auto_augment")
    hparams = {
        "translate_const": int(IMAGE_SIZE * 0.45),
        "img_mean": tuple(round(255 * value) for value in MEAN),
        "interpolation": Image.Resampling.BICUBIC,
    }
    augment = auto_augment.rand_augment_transform("rand-m9-mstd0.5-inc1", hparams)
    erase = _timm_module(folder, "random_erasing").RandomErasing(0.25, mode="pixel", device="cpu")
    mixup = _timm_module(folder, "mixup").Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, switch_prob=0.5, mode="batch")
    return CropFlip(augment, erase), mixup


def _timm_module(folder: Path | None, name: str) -> ModuleType:
    """``timm.data.NAME`` alone, by its file: importing the package would import torchvision."""
    if folder is None:
        spec = importlib.util.find_spec("timm")
        folder = Path(spec.origin).parent.parent if spec else Path()
    path = folder / "timm" / "data" / f"{name}.py"
    if not path.is_file():
        raise Unavailable(f"{path} not found: pip install --no-deps --target FOLDER timm, and pass --timm FOLDER")
    spec = importlib.util.spec_from_file_location(f"timm_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
