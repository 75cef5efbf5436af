"""Contestants that decode in worker processes of PyTorch's DataLoader: torchvision, timm's own loader, LitData and MosaicML's streaming."""

from __future__ import annotations

import io
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from loader_peers_pillow import CropFlip, Folder, _seed
from loader_settings import CROP_RATIO, CROP_SCALE, FLIP, IMAGE_SIZE, MEAN, STD, Settings
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

COPIES = 30  # of the images in an epoch, which outlasts the benchmark: workers rest at the end of one


def torchvision_batches(settings: Settings) -> Iterator[Tensor]:
    """Batches (B, 3, 224, 224): torchvision's own JPEG decoder and its transforms of uint8 tensors (v2), as its docs advise."""
    from torchvision.io import decode_jpeg, read_file
    from torchvision.transforms import InterpolationMode, v2

    size = (IMAGE_SIZE, IMAGE_SIZE)
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(size, CROP_SCALE, CROP_RATIO, InterpolationMode.BICUBIC, antialias=True),
            v2.RandomHorizontalFlip(FLIP),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )

    class Jpegs(Folder):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            path, label = self.items[index]
            return transform(decode_jpeg(read_file(path), mode="RGB")), label

    return _batches(Jpegs(settings.images.folder, transform), settings)


def timm_batches(settings: Settings) -> Iterator[Tensor]:
    """Batches (B, 3, 224, 224) of timm's ``create_loader``, whose prefetcher is for GPUs."""
    from timm.data import create_dataset, create_loader

    dataset = create_dataset("", str(settings.images.folder), is_training=True)
    dataset.reader.samples = dataset.reader.samples * COPIES
    loader = create_loader(
        dataset,
        (3, IMAGE_SIZE, IMAGE_SIZE),
        settings.batch_size,
        is_training=True,
        use_prefetcher=False,
        scale=CROP_SCALE,
        ratio=CROP_RATIO,
        hflip=FLIP,
        color_jitter=None,
        interpolation="bicubic",
        mean=MEAN,
        std=STD,
        num_workers=settings.workers,
        persistent_workers=True,
    )
    return (images for images, _labels in itertools.chain.from_iterable(itertools.repeat(loader)))


def litdata_batches(settings: Settings) -> Iterator[Tensor]:
    """Batches (B, 3, 224, 224) of LitData: JPEGs in its chunks, Pillow."""
    from litdata import StreamingDataLoader, StreamingDataset, optimize

    items = Folder(settings.images.folder, None).items * COPIES
    with tempfile.TemporaryDirectory() as folder:
        optimize(_sample, items, folder, chunk_bytes="64MB", num_workers=1)
        dataset = StreamingDataset(folder, shuffle=True, drop_last=True, transform=_Transform())
        loader = StreamingDataLoader(dataset, batch_size=settings.batch_size, num_workers=settings.workers, drop_last=True)
        while True:
            yield from loader


def streaming_batches(settings: Settings) -> Iterator[Tensor]:
    """Batches (B, 3, 224, 224) of MosaicML's streaming: JPEGs in MDS shards, Pillow."""
    from streaming import MDSWriter, StreamingDataset

    class Images(StreamingDataset):
        def __getitem__(self, index: int) -> Tensor:
            return transform(super().__getitem__(index))

    transform = _Transform()
    with tempfile.TemporaryDirectory() as folder:
        with MDSWriter(out=folder, columns={"image": "bytes", "label": "int"}) as writer:
            for item in Folder(settings.images.folder, None).items * COPIES:
                writer.write(_sample(item))
        dataset = Images(local=folder, shuffle=True, batch_size=settings.batch_size)
        yield from _batches(dataset, settings)


class _Transform:
    """A stored sample -> (3, 224, 224) float32."""

    def __init__(self) -> None:
        self._crop_flip = CropFlip(augment=None, erase=None)

    def __call__(self, sample: dict) -> Tensor:
        return self._crop_flip(Image.open(io.BytesIO(sample["image"])).convert("RGB"))


def _sample(item: tuple[str, int]) -> dict:
    path, label = item
    return {"image": Path(path).read_bytes(), "label": label}


def _batches(dataset: Dataset, settings: Settings) -> Iterator[Tensor]:
    """Batches of a dataset, whose samples are tensors or (tensor, label), for ever."""
    ordered = isinstance(dataset, Folder)  # the others shuffle by themselves
    if ordered:
        dataset.items = dataset.items * COPIES
    loader = DataLoader(
        dataset, settings.batch_size, shuffle=ordered, num_workers=settings.workers, worker_init_fn=_seed, drop_last=True
    )
    for batch in itertools.chain.from_iterable(itertools.repeat(loader)):
        yield batch[0] if isinstance(batch, list | tuple) else batch
