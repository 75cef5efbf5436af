"""Bilinear or bicubic, for crops and RandAugment: what is drawn, and the pixels on both paths."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from pipeline.augment import BatchRequest
from pipeline.augment.crop import Geometry
from pipeline.augment.randaugment import Op, Ops, RandAugment
from pipeline.config import AugmentConfig, DataConfig, load_config
from pipeline.loader.batches import TrainBatches
from pipeline.loader.cpu_transform import resize_and_crop
from pipeline.loader.dali_graph import full_graph, full_inputs
from pipeline.loader.loader import Loader
from pipeline.logs.run_files import augmentation_digests
from pipeline.shards.shard_set import ShardSet
from pipeline.stream.philox import Stream, uniforms
from support.batches import train_batches
from support.randaugment_reference import GEOMETRIC, reference

BATCH = 24
PLAIN = AugmentConfig()
LAYERS = AugmentConfig(rand_augment_ops=2)


def batches_of(
    folder: Path, rule: str, augment: AugmentConfig = LAYERS, rank: int = 0, ranks: int = 1, size: int = 64
) -> TrainBatches:
    data, split = DataConfig(num_threads=1, train_interpolation=rule), {"rank": rank, "world_size": ranks}
    shards = ShardSet(folder, "train")
    return train_batches(
        shards, global_batch=BATCH, micro_batch=BATCH // ranks, image_size=size, data=data, augment=augment, **split
    )


def levels_of(batches: TrainBatches, images: torch.Tensor) -> np.ndarray:
    """Normalized images as levels of 255."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (batches.data.mean, batches.data.std))
    return ((images * std + mean) * 255).round().int().numpy()


def loaded(batches: TrainBatches) -> np.ndarray:
    """The first batch of the CPU path, (B, 3, S, S) levels."""
    loader = Loader(batches, batches.data, torch.device("cpu"))
    images = levels_of(batches, next(loader).images)
    loader.close()
    return images


def draws(request: BatchRequest) -> list[np.ndarray]:
    """All that was drawn for a batch but the filters."""
    parts = [
        getattr(request, field.name)
        for field in fields(request)
        if field.name != "bilinear" and isinstance(getattr(request, field.name), np.ndarray)
    ]
    return [
        *parts,
        *vars(request.geometry).values(),
        *(array for draw in request.draws.values() for array in vars(draw).values()),
    ]


def test_random_is_a_fair_coin_for_each_crop_and_each_operation(digits_shards: Path) -> None:
    """Guards against one choice for a whole image, which timm does not make, and against choices that follow the other draws."""
    augment = AugmentConfig(rand_augment_ops=3)
    batches = train_batches(
        ShardSet(digits_shards, "train"),
        global_batch=50_000,
        micro_batch=50_000,
        data=DataConfig(train_interpolation="random"),
        augment=augment,
    )
    request = batches.request(0)
    chosen = request.bilinear.astype(float)  # (n, 4)
    crops = uniforms(Stream.CROP_AND_FLIP, batches.seed, request.epoch, request.position, 4)
    np.testing.assert_allclose(chosen.mean(axis=0), 0.5, atol=0.012)  # 5 standard deviations
    together = np.corrcoef(np.column_stack([chosen, crops]).T)  # (8, 8)
    assert np.abs(together - np.eye(8)).max() < 0.023  # 5 standard deviations
    assert batches_of(digits_shards, "bilinear").request(0).bilinear.all()


@pytest.mark.parametrize("augment", [PLAIN, LAYERS])
def test_the_key_changes_no_other_draw(augment: AugmentConfig, digits_shards: Path) -> None:
    """Guards against runs with bicubic filters that are another stream than before there was a choice."""
    plain = batches_of(digits_shards, "bicubic", augment).request(3)
    assert plain.bilinear is None
    for rule in ("bilinear", "random"):
        request = batches_of(digits_shards, rule, augment).request(3)
        for before, after in zip(draws(plain), draws(request), strict=True):
            np.testing.assert_array_equal(before, after)
        assert request.bilinear.shape == (BATCH, 1 + augment.rand_augment_ops)
        assert np.not_equal(augmentation_digests(plain), augmentation_digests(request)).all(), "the sample log tells them apart"
    assert 0 < request.bilinear[:, 0].sum() < BATCH


def test_filters_do_not_depend_on_the_number_of_processes(digits_shards: Path) -> None:
    """Guards against a restart on other hardware that trains on other pixels."""
    whole = batches_of(digits_shards, "random").request(2).bilinear
    parts = [batches_of(digits_shards, "random", rank=rank, ranks=4).request(2).bilinear for rank in range(4)]
    np.testing.assert_array_equal(whole, np.concatenate(parts))


def test_images_with_bicubic_draws_are_those_of_a_bicubic_run(digits_shards: Path) -> None:
    """Guards against filters that are given to another image, or to another of its operations, on the CPU path."""
    batches = batches_of(digits_shards, "random")
    bicubic, bilinear, random = (loaded(batches_of(digits_shards, rule)) for rule in ("bicubic", "bilinear", "random"))
    request = batches.request(0)
    geometric = np.isin(request.drawn(RandAugment).op, GEOMETRIC)
    chosen = np.column_stack([request.bilinear[:, 0], request.bilinear[:, 1:] & geometric])
    matters = np.column_stack([np.ones(BATCH, bool), geometric])
    cases = {}
    for i in range(BATCH):
        cases.setdefault("mixed" if len(set(chosen[i][matters[i]])) > 1 else bool(chosen[i, 0]), []).append(i)
    assert set(cases) == {"mixed", False, True}
    for i in cases[False]:
        np.testing.assert_array_equal(random[i], bicubic[i])
    for i in cases[True]:
        np.testing.assert_array_equal(random[i], bilinear[i])
    for i in cases["mixed"]:
        assert (random[i] != bicubic[i]).any() and (random[i] != bilinear[i]).any()


def test_the_cpus_pixels_are_pillows(imagenet_samples: Path) -> None:
    """Guards against a bilinear resize without antialiasing, and with it against the other filter: 6 photographs."""
    zero = np.zeros((1, 2))
    for path in sorted(imagenet_samples.glob("*/*.JPEG"))[::90]:
        picture = Image.open(path).convert("RGB")
        window = torch.from_numpy(np.array(picture))
        geometry = Geometry(zero, np.array([picture.size[::-1]]), np.full((1, 2), 96.0), zero, np.zeros(1))
        for bilinear, filter_ in ((False, Image.Resampling.BICUBIC), (True, Image.Resampling.BILINEAR)):
            ours = resize_and_crop(window, geometry, 0, 96, bilinear).astype(int)
            difference = np.abs(ours - np.asarray(picture.resize((96, 96), filter_)))
            assert difference.max() <= 1 and (difference > 0).mean() < 0.01


@pytest.mark.parametrize(("rule", "size"), [("random", 224), ("bilinear", 64)])
def test_the_graph_is_within_two_levels_of_the_cpu(rule: str, size: int, imagenet_shards: Path) -> None:
    """Guards against a graph for GPUs that takes another filter, or repeats the border's pixels where Pillow leaves them out."""
    batches = batches_of(imagenet_shards, rule, PLAIN, size=size)
    request = batches.request(0)
    inputs = full_inputs(list(map(batches.shards.read, request.index)), request)
    (output,) = full_graph(lambda: inputs, batches, None, 1, 1).run()
    graph = torch.from_dlpack(output.as_tensor()).permute(0, 3, 1, 2).numpy().astype(int)
    difference = np.abs(graph - loaded(batches))
    assert difference.max() <= 2
    assert (difference > 0).mean() < 0.015 and (difference > 1).mean() < 1e-5


def test_the_graph_gives_each_operation_its_filter(imagenet_shards: Path) -> None:
    """Guards against RandAugment's filters in another order than the images' or the operations' in the graph for GPUs."""
    batches = batches_of(imagenet_shards, "random", AugmentConfig(rand_augment_ops=3))
    request = batches.request(0)
    linear = request.bilinear[:, 1:]
    op = np.where(np.arange(BATCH)[:, None] % 3 == np.arange(3), Op.ROTATE, Op.NOTHING).astype(np.int32)  # one layer of three
    (rand_augment,) = batches.augmentations
    fixed = np.column_stack([np.zeros(BATCH, bool), linear])
    request = replace(request, bilinear=fixed, draws={rand_augment: Ops(op, np.full(op.shape, 20, np.float32))})
    inputs = full_inputs(list(map(batches.shards.read, request.index)), request)
    (output,) = full_graph(lambda: inputs, batches, None, 1, 1).run()
    graph = torch.from_dlpack(output.as_tensor()).numpy().astype(int)
    plain = replace(request, draws={}, bilinear=None)
    bare = full_inputs(list(map(batches.shards.read, plain.index)), plain)
    (output,) = full_graph(lambda: bare, batches_of(imagenet_shards, "bicubic", PLAIN), None, 1, 1).run()
    before = torch.from_dlpack(output.as_tensor()).numpy()
    linear = linear[np.arange(BATCH), np.arange(BATCH) % 3]
    assert 0 < linear.sum() < BATCH
    for i in range(BATCH):
        filter_ = Image.Resampling.BILINEAR if linear[i] else Image.Resampling.BICUBIC
        expected = np.asarray(reference(Image.fromarray(before[i]), Op.ROTATE, 20.0, filter_))
        assert np.abs(graph[i] - expected).max() <= 1, i


@pytest.mark.parametrize("name", ["posmlp_t", "posmlp_s", "gmlp_s", "ablations/posmlp_table1_gmlp_sgu"])
def test_posmlps_recipe_draws_the_filter(name: str) -> None:
    """Guards against a recipe whose published configuration says random."""
    assert load_config(name).data.train_interpolation == "random"
    assert load_config("pervit_t").data.train_interpolation == "bicubic"
