"""Contestants that decode with DALI: our loader, and DALI's own reader of WebDataset tars."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from loader_settings import CROP_RATIO, CROP_SCALE, FLIP, IMAGE_SIZE, MEAN, STD, Settings
from torch import Tensor

from pipeline.config import AugmentConfig, DataConfig
from pipeline.loader.batches import TrainBatches
from pipeline.loader.loader import Loader
from pipeline.shards.shard_set import ShardSet

# DeiT's recipe after the crop, which the papers use: what timm does in `pillow_full`.
FULL_RECIPE = AugmentConfig(
    rand_augment_ops=2, rand_augment_magnitude=9, rand_augment_std=0.5, erasing=0.25, mixup=0.8, cutmix=1.0, mix_switch=0.5
)


def our_source(settings: Settings, full: bool) -> TrainBatches:
    """The batches that our loader is asked for.

    Args:
        settings: what to read.
        full: the full recipe.
    """
    return TrainBatches(
        shards=ShardSet(settings.images.shards, "train"),
        seed=0,
        image_size=IMAGE_SIZE,
        global_batch_size=settings.batch_size,
        batch_size=settings.batch_size,
        data=_our_config(settings),
        augment=FULL_RECIPE if full else AugmentConfig(),
    )


def our_loader(settings: Settings, full: bool) -> Loader:
    """Our loader as ``pipeline.train`` builds it. The one place that knows its interface.

    Args:
        settings: what to read.
        full: the full recipe.
    """
    return Loader(our_source(settings, full), _our_config(settings), torch.device("cpu"))


def _our_config(settings: Settings) -> DataConfig:
    return DataConfig(
        path=str(settings.images.shards),
        num_threads=settings.workers,
        crop_scale=CROP_SCALE,
        crop_ratio=CROP_RATIO,
        flip=FLIP,
        mean=MEAN,
        std=STD,
    )


def our_batches(settings: Settings, full: bool) -> Iterator[Tensor]:
    """Batches (B, 3, 224, 224) of our loader."""
    loader = our_loader(settings, full)
    return (batch.images for batch in loader)


def native_batches(settings: Settings, cubic: bool) -> Iterator[Tensor]:
    """Batches (B, 3, 224, 224) of DALI's ``readers.webdataset`` and ``decoders.image_random_crop``.

    Args:
        cubic: antialiased bicubic; else antialiased linear, DALI's default.
    """
    from nvidia.dali import fn, pipeline_def, types

    tars = sorted(map(str, settings.images.shards.glob("*.tar")))

    @pipeline_def(batch_size=settings.batch_size, num_threads=settings.workers, device_id=None, seed=0)
    def graph():
        jpegs, labels = fn.readers.webdataset(
            paths=tars,
            index_paths=[tar.removesuffix("tar") + "idx" for tar in tars],
            ext=["jpg", "cls"],
            missing_component_behavior="error",
            random_shuffle=True,
        )
        images = fn.decoders.image_random_crop(
            jpegs, random_area=CROP_SCALE, random_aspect_ratio=CROP_RATIO, num_attempts=10, output_type=types.RGB
        )
        interpolation = types.INTERP_CUBIC if cubic else types.INTERP_LINEAR
        images = fn.resize(images, size=(IMAGE_SIZE, IMAGE_SIZE), interp_type=interpolation, antialias=True)
        images = fn.crop_mirror_normalize(
            images,
            mirror=fn.random.coin_flip(probability=FLIP),
            mean=[255 * value for value in MEAN],
            std=[255 * value for value in STD],
            dtype=types.FLOAT,
            output_layout="CHW",
        )
        return images, labels

    pipeline = graph()
    pipeline.build()
    while True:
        images, _labels = pipeline.run()
        yield torch.from_dlpack(images.as_tensor())
