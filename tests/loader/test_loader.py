"""The loader's stream is a pure function: the same on any number of processes, after any restart."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from pipeline.augment.crop import UNIFORMS_PER_SAMPLE, train_geometry
from pipeline.config import AugmentConfig, DataConfig
from pipeline.loader.batches import EvalBatches, TrainBatches
from pipeline.loader.loader import Batch, Loader
from pipeline.shards.image_headers import CutOff, jpeg_header, kept_format
from pipeline.shards.shard_set import ShardSet
from support.batches import train_batches

GLOBAL_BATCH = 48
CPU = torch.device("cpu")
CONFIG = DataConfig(num_threads=1)


NOTHING = AugmentConfig()
EVERYTHING = AugmentConfig(rand_augment_ops=2, erasing=0.25, mixup=0.8, cutmix=1.0, mix_group=4, repeats=2)


def train_loader(
    shards: ShardSet,
    rank: int,
    world_size: int,
    micro_batch: int,
    start: int = 0,
    size: int = 64,
    seed: int = 7,
    config: DataConfig = CONFIG,
    augment: AugmentConfig = NOTHING,
) -> Loader:
    split = {"rank": rank, "world_size": world_size, "micro_batch": micro_batch}
    source = train_batches(shards, global_batch=GLOBAL_BATCH, image_size=size, seed=seed, data=config, augment=augment, **split)
    return Loader(source, config, CPU, start=start)


def global_batches(shards: ShardSet, world_size: int, micro_batch: int, steps: int, **options) -> Iterator[list[Batch]]:
    """Per step the micro-batches of all processes, in the stream's order."""
    loaders = [train_loader(shards, rank, world_size, micro_batch, **options) for rank in range(world_size)]
    for _ in range(steps):
        yield [next(loader) for _ in range(loaders[0].batches.batches_per_step) for loader in loaders]
    for loader in loaders:
        loader.close()


def test_the_form_of_the_images(digits_shards: Path) -> None:
    """Guards against augmentation in bf16 or of images in another layout: the noise of erasing goes to places in this one."""
    shards, augment = ShardSet(digits_shards, "train"), AugmentConfig(erasing=1.0, mixup=0.8)
    plain = train_loader(shards, 0, 1, 8, augment=augment)
    formed = Loader(plain.batches, CONFIG, CPU, image_format=(torch.bfloat16, torch.channels_last))
    for images, given in ((next(plain).images, next(formed).images) for _ in range(2)):
        assert given.is_contiguous(memory_format=torch.channels_last) and images.is_contiguous()
        assert torch.equal(given, images.to(torch.bfloat16))
    plain.close()
    formed.close()


def joined(batches: list[Batch]) -> dict[str, np.ndarray]:
    """What the network would see in one step, and how each image came about."""
    geometry = [batch.request.geometry for batch in batches]
    return {
        "images": torch.cat([b.images for b in batches]).numpy(),
        **{name: torch.cat([getattr(b, name) for b in batches]).numpy() for name in ("labels", "other_labels", "weight")},
        **{name: np.concatenate([getattr(b.request, name) for b in batches]) for name in ("index", "epoch", "position")},
        **{name: np.concatenate([getattr(g, name) for g in geometry]) for name in ("start", "shape", "flip")},
    }


@pytest.mark.parametrize(
    ("data", "order", "augment"),
    [("digits", "full", EVERYTHING), ("digits", "block", AugmentConfig(repeats=3)), ("imagenet", "full", EVERYTHING)],
)
def test_the_same_stream_on_1_2_and_4_processes(data: str, order: str, augment: AugmentConfig, request) -> None:
    """Guards against a stream that depends on how many processes read it: samples, crops, flips, every augmentation and the
    mixed pixels, exactly."""
    shards = ShardSet(request.getfixturevalue(f"{data}_shards"), "train")
    options = {"config": DataConfig(num_threads=1, order=order, block_size=50, window_blocks=4), "augment": augment}
    steps = 32 if data == "digits" else 8  # past the end of the first epoch (26.7, 30.0 and 5.3 steps)
    alone = [joined(batches) for batches in global_batches(shards, 1, 48, steps, **options)]
    assert alone[-1]["epoch"].max() == 1, "the comparison must reach into the second epoch"
    for world_size, micro_batch in ((1, 12), (2, 24), (2, 8), (4, 12), (4, 4)):
        for step, batches in enumerate(global_batches(shards, world_size, micro_batch, steps, **options)):
            for name, values in joined(batches).items():
                assert np.array_equal(values, alone[step][name]), (name, world_size, micro_batch, step)


@pytest.mark.parametrize(("order", "first"), [("full", 5), ("block", 84)])
def test_a_loader_that_starts_later_goes_on_exactly(order: str, first: int, digits_shards: Path) -> None:
    """Guards against a resume that repeats, skips or differently augments a sample, also behind the end of an epoch."""
    shards = ShardSet(digits_shards, "train")
    options = {"config": DataConfig(num_threads=1, order=order, block_size=50, window_blocks=4), "augment": EVERYTHING}
    reference = train_loader(shards, 1, 2, 8, **options)  # three batches a step
    expected = [next(reference) for _ in range(first + 9)]
    assert (expected[-1].request.epoch.max() > 0) == (order == "block")
    resumed = train_loader(shards, 1, 2, 8, start=first, **options)
    for batch in expected[first:]:
        again = next(resumed)
        for name in ("images", "labels", "other_labels", "weight"):
            assert torch.equal(getattr(again, name), getattr(batch, name)), name
    other_seed = next(train_loader(shards, 1, 2, 8, seed=8))
    assert not np.array_equal(other_seed.request.index, expected[0].request.index)


def test_an_epoch_holds_every_sample_once_and_augments_anew(digits_shards: Path) -> None:
    """Guards against an epoch's remainder that is dropped, and against the same crop in every epoch."""
    shards = ShardSet(digits_shards, "train")
    source = train_loader(shards, 0, 1, 48).batches
    requests = [source.request(i) for i in range(60)]  # two epochs and a bit, not a multiple of the batch
    epoch = np.concatenate([r.epoch for r in requests])
    index = np.concatenate([r.index for r in requests])
    start = np.concatenate([r.geometry.start for r in requests])
    for e in (0, 1):
        assert np.array_equal(np.sort(index[epoch == e]), np.arange(len(shards)))
    first, second = (start[epoch == e][np.argsort(index[epoch == e])] for e in (0, 1))
    assert (first == second).all(axis=1).mean() < 0.1


@pytest.mark.parametrize("repeats", [1, 2])
def test_the_disk_is_told_of_each_block_before_it_is_needed(repeats: int, digits_shards: Path) -> None:
    """Guards against hints that name other blocks than the order will read: late ones are useless, wrong ones cost bandwidth."""
    shards = ShardSet(digits_shards, "train")
    config = DataConfig(num_threads=1, order="block", block_size=50, window_blocks=4)
    source = TrainBatches(
        shards=shards,
        seed=7,
        image_size=64,
        global_batch_size=48,
        batch_size=48,
        data=config,
        augment=AugmentConfig(repeats=repeats),
    )
    announced, of_this_window = set(), set()
    for i in range(70):  # into the third epoch
        request = source.request(i)
        coming = source.coming_blocks(i)
        shards.will_need(coming)
        if i * 48 >= 200 * repeats:  # the first window comes unannounced
            assert announced.issuperset(request.index.tolist()), i
        if coming:
            assert sum(count for _, count in coming) <= 4 * 50 + 50, "a window, with what is left over at the end of the set"
            of_next_window = _samples_of(coming)
            announced, of_this_window = of_this_window | of_next_window, of_next_window
    assert len(announced) < 500, "not simply everything"


def _samples_of(runs: list[tuple[int, int]]) -> set[int]:
    return {sample for first, count in runs for sample in range(first, first + count)}


def sequential_crop(height: int, width: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Random resized crop as torchvision writes it, one image at a time: (top, left, height, width)."""
    for _ in range(10):
        area = height * width * rng.uniform(0.08, 1.0)
        ratio = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
        w, h = round(np.sqrt(area * ratio)), round(np.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return rng.integers(0, height - h + 1), rng.integers(0, width - w + 1), h, w
    raise AssertionError("not reached with these sizes")


def test_random_resized_crops_are_distributed_as_the_recipe_says() -> None:
    """Guards against a crop of the wrong area, aspect or place, and against one that leaves the image."""
    count = 20_000
    rng = np.random.default_rng(0)
    height, width = np.full(count, 400), np.full(count, 500)
    g = train_geometry(height, width, rng.random((count, UNIFORMS_PER_SAMPLE)), 224, (0.08, 1.0), (3 / 4, 4 / 3), 0.5)
    assert (g.start >= 0).all() and (g.start + g.shape <= [400, 500]).all()
    assert abs(g.flip.mean() - 0.5) < 0.02
    ours = np.concatenate([g.start, g.shape], axis=1)  # (count, 4)
    reference = np.array([sequential_crop(400, 500, rng) for _ in range(count)])
    for name, of in {
        "top": lambda crop: crop[:, 0] / 400,
        "left": lambda crop: crop[:, 1] / 500,
        "area": lambda crop: crop[:, 2] * crop[:, 3] / (400 * 500),
        "ratio": lambda crop: crop[:, 3] / crop[:, 2],
    }.items():
        levels = np.linspace(0.02, 0.98, 25)
        assert np.abs(np.quantile(of(ours), levels) - np.quantile(of(reference), levels)).max() < 0.025, name


def test_a_panorama_falls_back_to_a_centred_window() -> None:
    """Guards against an empty crop where none of the ten attempts fits."""
    g = train_geometry([10], [5000], np.full((1, UNIFORMS_PER_SAMPLE), 0.9), 224, (0.5, 1.0), (3 / 4, 4 / 3), 0.5)
    assert g.shape.tolist() == [[10, 13]] and g.start.tolist() == [[0, 2493]]


@pytest.mark.parametrize(("image_size", "short_side"), [(224, 256), (64, 73)])
def test_evaluation_pixels_are_pillows(imagenet_shards: Path, image_size: int, short_side: int) -> None:
    """Guards against an interpolation that costs accuracy (DALI #1507): bicubic, antialiased, ratio kept, centre crop."""
    shards = ShardSet(imagenet_shards, "val")
    batch = next(Loader(EvalBatches(shards=shards, image_size=image_size, batch_size=32, eval_crop=0.875), CONFIG, CPU))
    mean, std = (torch.tensor(values)[:, None, None] for values in (CONFIG.mean, CONFIG.std))
    ours = ((batch.images * std + mean) * 255).permute(0, 2, 3, 1).numpy()  # (32, size, size, 3)
    for i, jpeg in enumerate(list(map(shards.read, batch.request.index))):
        image = Image.open(io.BytesIO(jpeg.tobytes())).convert("RGB")
        scale = [side * short_side // min(image.size) for side in image.size]
        left, top = (round((side - image_size) / 2) for side in scale)
        pillow = np.asarray(
            image.resize(scale, Image.Resampling.BICUBIC).crop((left, top, left + image_size, top + image_size))
        )
        difference = np.abs(ours[i] - pillow)
        assert difference.mean() < 0.5 and np.quantile(difference, 0.999) <= 4, f"image {i}, of 255 levels"


def test_training_pixels_are_pillows_crop_resize_and_flip(imagenet_shards: Path) -> None:
    """Guards against a crop window, a flip or a resize that DALI understands differently than we do."""
    shards = ShardSet(imagenet_shards, "train")
    batch = next(train_loader(shards, 0, 1, 48, size=160))
    mean, std = (torch.tensor(values)[:, None, None] for values in (CONFIG.mean, CONFIG.std))
    ours = ((batch.images * std + mean) * 255).permute(0, 2, 3, 1).numpy()
    geometry = batch.request.geometry
    for i, jpeg in enumerate(list(map(shards.read, batch.request.index))):
        (top, left), (height, width) = geometry.start[i], geometry.shape[i]
        image = Image.open(io.BytesIO(jpeg.tobytes())).convert("RGB").crop((left, top, left + width, top + height))
        pillow = np.asarray(image.resize((160, 160), Image.Resampling.BICUBIC))
        pillow = pillow[:, ::-1] if geometry.flip[i] else pillow
        assert np.abs(ours[i] - pillow).mean() < 1.0, f"image {i}, of 255 levels"
        assert batch.labels[i] == shards.samples["label"][batch.request.index[i]]


@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 359), (1, 50), (2, 50), (3, 7), (4, 128)])
def test_evaluation_counts_every_image_once(digits_shards: Path, world_size: int, batch_size: int) -> None:
    """Guards against images that are evaluated twice or not at all when the batches do not divide the set."""
    shards = ShardSet(digits_shards, "val")
    sources = [
        EvalBatches(shards=shards, image_size=64, batch_size=batch_size, rank=rank, world_size=world_size, eval_crop=0.875)
        for rank in range(world_size)
    ]
    assert len({len(source) for source in sources}) == 1, "ZeRO-3 needs the same number of forward passes everywhere"
    requests = [source.request(i) for source in sources for i in range(len(source))]
    counted = np.concatenate([r.index[r.valid] for r in requests])
    assert np.array_equal(np.sort(counted), np.arange(359))
    assert all(len(r.index) == batch_size for r in requests)


def test_images_of_all_kinds_have_their_size_read_and_cut_off_ones_are_found() -> None:
    """Guards against a header check that refuses good files (grey, progressive, PNG) or passes half ones."""
    for mode, options in (("RGB", {}), ("L", {}), ("CMYK", {}), ("RGB", {"progressive": True}), ("RGB", {"format": "PNG"})):
        file = io.BytesIO()
        Image.new(mode, (31, 17)).save(file, **{"format": "JPEG", **options})
        whole = file.getvalue()
        if "format" in options:
            assert kept_format(whole) == ("png", 31, 17)
            for length in range(8, len(whole) - 4):
                with suppress(CutOff):
                    assert kept_format(whole[:length]) is None
            continue
        assert jpeg_header(whole)[2:4] == jpeg_header(whole + b"trailing bytes")[2:4] == (31, 17)
        for length in range(len(whole) - 4):
            with pytest.raises(ValueError, match="cut off|not a JPEG"):
                jpeg_header(whole[:length])
