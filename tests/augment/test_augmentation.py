"""Random erasing, Mixup and CutMix against independent references; the whole recipe against Pillow's."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from pipeline.augment import erasing, mixing
from pipeline.augment.randaugment import RandAugment
from pipeline.config import AugmentConfig, DataConfig, TrainConfig
from pipeline.loader.batches import EvalBatches, TrainBatches
from pipeline.loader.cpu_transform import Normalization
from pipeline.loader.dali_graph import full_graph, full_inputs
from pipeline.loader.loader import Batch, Loader
from pipeline.shards.shard_set import ShardSet
from pipeline.step.loss import Objective, label_loss
from support.pillow_recipe import training_image

SIZE = 64
CONFIG = DataConfig(num_threads=1)


def source_of(folder: Path, augment: AugmentConfig, rank: int = 0, world_size: int = 1, micro_batch: int = 48) -> TrainBatches:
    return TrainBatches(
        shards=ShardSet(folder, "train"),
        seed=7,
        image_size=SIZE,
        global_batch_size=48,
        batch_size=micro_batch,
        rank=rank,
        world_size=world_size,
        data=CONFIG,
        augment=augment,
    )


def batches_of(folder: Path, augment: AugmentConfig, count: int) -> list[Batch]:
    loader = Loader(source_of(folder, augment), CONFIG, torch.device("cpu"))
    return [next(loader) for _ in range(count)]


def reference_erasing(rng: np.random.Generator, size: int) -> tuple[int, int, int, int] | None:
    """The reference code's loop, one image at a time: (top, left, height, width)."""
    if rng.random() > 0.25:
        return None
    for _ in range(10):
        area = rng.uniform(0.02, 1 / 3) * size * size
        aspect = math.exp(rng.uniform(math.log(0.3), math.log(1 / 0.3)))
        height, width = int(round(math.sqrt(area * aspect))), int(round(math.sqrt(area / aspect)))
        if width < size and height < size:
            return int(rng.integers(0, size - height + 1)), int(rng.integers(0, size - width + 1)), height, width
    return None


def test_erased_rectangles_are_distributed_as_the_recipe_says() -> None:
    """Guards against rectangles of another size, shape, place or frequency than the models were trained with."""
    rng = np.random.default_rng(0)
    ours = erasing.RandomErasing(0.25, 224).sample(rng.random((40_000, erasing.UNIFORMS_PER_SAMPLE))).box
    assert abs((ours[:, 2] > 0).mean() - 0.25) < 0.01
    ours = ours[ours[:, 2] > 0]
    assert (ours >= 0).all() and (ours[:, 0] + ours[:, 2] <= 224).all() and (ours[:, 1] + ours[:, 3] <= 224).all()
    reference = np.array([box for _ in range(40_000) if (box := reference_erasing(rng, 224))])
    levels = np.linspace(0.02, 0.98, 25)
    for name, of in {
        "top": lambda box: box[:, 0] / 224,
        "left": lambda box: box[:, 1] / 224,
        "area": lambda box: box[:, 2] * box[:, 3] / 224**2,
        "aspect": lambda box: np.log(box[:, 2] / box[:, 3]),
    }.items():
        assert np.abs(np.quantile(of(ours), levels) - np.quantile(of(reference), levels)).max() < 0.04, name


def test_erasing_puts_unit_noise_there_and_nothing_elsewhere(digits_shards: Path) -> None:
    """Guards against one colour per rectangle, noise of the wrong scale, noise that all images share, and erasing beside the box."""
    plain = batches_of(digits_shards, AugmentConfig(), 4)
    erased = batches_of(digits_shards, AugmentConfig(erasing=0.5), 4)
    noise = []
    for before, after in zip(plain, erased):
        boxes = after.request.drawn(erasing.RandomErasing).box
        assert 10 < (boxes[:, 2] > 0).sum() < 38
        for i, (top, left, height, width) in enumerate(boxes.tolist()):
            inside = torch.zeros(SIZE, SIZE, dtype=torch.bool)
            inside[top : top + height, left : left + width] = True
            assert torch.equal(after.images[i][:, ~inside], before.images[i][:, ~inside])
            noise.append(after.images[i][:, inside].flatten())
    values = torch.cat(noise)
    assert abs(values.mean()) < 0.01 and abs(values.std() - 1) < 0.01
    firsts = [n[0].item() for n in noise if len(n)]
    assert len(set(firsts)) == len(firsts)


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_mixing_weights_are_drawn_from_their_beta_distributions(mixup: float, cutmix: float) -> None:
    """Guards against a sampler of our own that is not Beta, and against the wrong alpha for a method."""
    rng = np.random.default_rng(0)
    drawn = mixing.MixupCutmix(mixup, cutmix, 0.2, 16, 224).sample(rng.random((40_000, mixing.UNIFORMS_PER_GROUP)), 1)
    share_of_mixup = {(0.8, 0.0): 1.0, (0.0, 1.0): 0.0, (0.8, 1.0): 0.8}[mixup, cutmix]
    assert abs(drawn.blend.mean() - share_of_mixup) < 0.01
    levels = np.linspace(0.02, 0.98, 25)
    if mixup:
        reference = rng.beta(mixup, mixup, 40_000)
        assert np.abs(np.quantile(drawn.weight[drawn.blend], levels) - np.quantile(reference, levels)).max() < 0.03
    if cutmix:
        kept = []
        for weight in rng.beta(cutmix, cutmix, 40_000):  # the reference code's box, clipped at the border
            side, row, column = int(224 * math.sqrt(1 - weight)), rng.integers(224), rng.integers(224)
            rows = np.clip(row + side // 2, 0, 224) - np.clip(row - side // 2, 0, 224)
            columns = np.clip(column + side // 2, 0, 224) - np.clip(column - side // 2, 0, 224)
            kept.append(1 - rows * columns / 224**2)
        assert np.abs(np.quantile(drawn.weight[~drawn.blend], levels) - np.quantile(kept, levels)).max() < 0.03


def test_mixed_pixels_and_labels_agree(digits_shards: Path) -> None:
    """Guards against labels that belong to other images than the pixels, and against a weight that is the box's complement."""
    plain = batches_of(digits_shards, AugmentConfig(), 6)
    mixed = batches_of(digits_shards, AugmentConfig(mixup=0.8, cutmix=1.0, mix_group=8), 6)
    methods = set()
    for before, after in zip(plain, mixed):
        m = after.request.drawn(mixing.MixupCutmix)
        for i in range(48):
            group, place = divmod(i, 8)
            partner = group * 8 + (place + int(m.distance[group])) % 8
            assert partner != i
            assert after.labels[i] == before.labels[i] and after.other_labels[i] == before.labels[partner]
            own, other, weight = before.images[i], before.images[partner], float(after.weight[i])
            if m.blend[group]:
                expected = weight * own + (1 - weight) * other
            else:
                top, left, height, width = m.box[group].tolist()
                expected = own.clone()
                expected[:, top : top + height, left : left + width] = other[:, top : top + height, left : left + width]
                assert weight == pytest.approx(1 - height * width / SIZE**2)
            methods.add(bool(m.blend[group]))
            torch.testing.assert_close(after.images[i], expected, rtol=1e-5, atol=1e-5)
    assert methods == {True, False}


def test_the_loss_is_the_cross_entropy_with_the_mixed_smoothed_target(digits_shards: Path) -> None:
    """Guards against smoothing that is applied before or after the mix in another way than the recipe's."""
    (batch,) = batches_of(digits_shards, AugmentConfig(mixup=0.8, cutmix=1.0, mix_group=8), 1)
    scores = torch.randn(48, 10, generator=torch.Generator().manual_seed(0))

    def smoothed(labels: Tensor) -> Tensor:
        return torch.full((48, 10), 0.1 / 10).scatter_(1, labels[:, None], 1 - 0.1 + 0.1 / 10)

    weight = batch.weight[:, None]
    target = weight * smoothed(batch.labels) + (1 - weight) * smoothed(batch.other_labels)  # (48, 10)
    expected = -(target * F.log_softmax(scores, dim=1)).sum(dim=1).mean()
    loss = Objective(label_loss(TrainConfig(label_smoothing=0.1)))
    torch.testing.assert_close(loss(scores, batch), expected)
    (unmixed,) = batches_of(digits_shards, AugmentConfig(), 1)
    expected = F.cross_entropy(scores, unmixed.labels, label_smoothing=0.1)
    torch.testing.assert_close(loss(scores, unmixed), expected)


@pytest.mark.parametrize("order", ["the papers'", "evaluation"])
def test_the_graph_for_gpus_gives_the_pixels_that_the_cpu_gets(order: str, imagenet_shards: Path) -> None:
    """Guards against a GPU run that sees other images than the tests on a CPU; here DALI's whole graph runs on the CPU.

    The resizes differ by rounding (mean below 0.5 of 255 levels); RandAugment can amplify that (equalize, solarize).
    """
    shards = ShardSet(imagenet_shards, "train")
    augment = AugmentConfig(rand_augment_ops=2)
    if order == "evaluation":
        source = EvalBatches(shards=shards, image_size=160, batch_size=48, eval_crop=0.875)
    else:
        source = TrainBatches(
            shards=shards,
            seed=7,
            image_size=160,
            global_batch_size=48,
            batch_size=48,
            data=CONFIG,
            augment=augment,
        )
    request = source.request(0)
    inputs = full_inputs(list(map(shards.read, request.index)), request)
    graph = full_graph(lambda: inputs, source, None, 1, 1)
    (output,) = graph.run()
    whole = Normalization(CONFIG.mean, CONFIG.std)(torch.from_dlpack(output.as_tensor()).permute(0, 3, 1, 2))
    split = next(Loader(source, CONFIG, torch.device("cpu"))).images
    std = torch.tensor(CONFIG.std)[:, None, None]
    difference = ((whole - split) * std * 255).abs().mean(dim=(1, 2, 3))  # (48,) levels
    ops = request.drawn(RandAugment)
    changed = torch.zeros(48, dtype=torch.bool) if ops is None else torch.from_numpy(ops.op.any(axis=1))
    assert difference[~changed].max() < 1.0
    assert difference.max() < 6.0 and difference.mean() < 1.0


def statistics(images: Tensor) -> dict[str, Tensor]:
    """What a distribution of images (n, 3, H, W) looks like: moments per channel, between images, along edges, at borders."""
    spread = images.std(dim=(2, 3))  # (n, 3)
    edges = (images[..., 1:] - images[..., :-1]).abs().mean(dim=(1, 2, 3))  # (n,)
    levels = torch.tensor([0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98])
    return {
        "mean": images.mean(dim=(0, 2, 3)),
        "spread within images": spread.mean(dim=0),
        "spread of image means": images.mean(dim=(2, 3)).std(dim=0),
        "pixel quantiles": torch.quantile(images[:, :, ::7, ::7].flatten()[: 1 << 24], levels),
        "edge quantiles": torch.quantile(edges, levels),
        "border": images[..., 0].mean(dim=(0, 2)),
    }


def test_the_whole_recipe_looks_like_pillows(imagenet_samples: Path, imagenet_shards: Path) -> None:
    """Guards against a recipe whose parts are right but whose order, frequencies or scales are not: 500 real images, four views each.

    Tolerance 0.07 of a standard deviation of the pixels. Two sets of views drawn by Pillow itself differ by up to 0.045.
    """
    size, views = 64, 4
    augment = AugmentConfig(rand_augment_ops=2, erasing=0.25)
    source = TrainBatches(
        shards=ShardSet(imagenet_shards, "train"),
        seed=7,
        image_size=size,
        global_batch_size=100,
        batch_size=100,
        data=CONFIG,
        augment=augment,
    )
    loader = Loader(source, CONFIG, torch.device("cpu"))
    ours = torch.cat([next(loader).images.clone() for _ in range(5 * views)])
    rng = np.random.default_rng(0)
    pictures = [Image.open(path).convert("RGB") for path in sorted(imagenet_samples.glob("*/*.JPEG"))]
    reference = np.stack([training_image(picture, size, rng) for picture in pictures for _ in range(views)])
    expected = statistics(torch.from_numpy(reference).permute(0, 3, 1, 2).float())
    for name, values in statistics(ours).items():
        torch.testing.assert_close(values, expected[name], atol=0.07, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
