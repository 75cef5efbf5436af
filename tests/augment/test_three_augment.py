"""3-Augment, colour jitter and the simple random crop: what is drawn, and the pixels on a CPU and in DALI's graph."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import numpy as np
import nvidia.dali.fn as fn
import nvidia.dali.types as types
import pytest
import torch
from nvidia.dali import pipeline_def
from PIL import Image, ImageFilter

from pipeline.augment import BatchRequest
from pipeline.augment.crop import UNIFORMS_PER_SAMPLE as CROP_UNIFORMS
from pipeline.augment.crop import padded_geometry
from pipeline.augment.randaugment import Op
from pipeline.augment.three_augment import UNIFORMS_PER_SAMPLE, ThreeAugment, box_weights
from pipeline.config import AugmentConfig, DataConfig
from pipeline.loader.batches import TrainBatches
from pipeline.loader.cpu_transform import Finisher, Normalization, resize_and_crop
from pipeline.loader.dali_graph import full_graph, full_inputs
from pipeline.loader.loader import Loader
from pipeline.logs.run_files import augmentation_digests
from pipeline.shards.shard_set import ShardSet
from pipeline.stream.philox import Stream, uniforms
from support.randaugment_reference import SIZE, flat_and_extreme_images, photographs
from support.three_augment_reference import reference, simple_crop

CONFIG = DataConfig(num_threads=1)
DEIT_III = AugmentConfig(three_augment=True, color_jitter=0.3)
RADII = np.float32([0.1, 0.3, 0.5, 0.87, 1, 1.37, 1.5, 1.99, 2])  # some have weights of a sixth or a tenth: many ties
BATCH = 24


def drawn(count: int, one_of_three: bool = True, jitter: float = 0.3) -> ThreeAugment:
    numbers = uniforms(Stream.THREE_AUGMENT, 3, np.zeros(count), np.arange(count), UNIFORMS_PER_SAMPLE)
    return ThreeAugment(one_of_three, jitter).sample(numbers)


@pytest.fixture(scope="module")
def images(imagenet_samples: Path) -> list[Image.Image]:
    """Four photographs, and three images of one level, two levels and noise."""
    return [*photographs(imagenet_samples, 4), *(each for each in flat_and_extreme_images() if each.size == (SIZE, SIZE))]


def cases(count: int) -> ThreeAugment:
    """What is drawn for ``count`` samples, with the radii of ``RADII`` instead of the first blurs'."""
    chosen = drawn(count)
    blurred = np.flatnonzero(chosen.blur)[: len(RADII)]
    chosen.blur[blurred] = RADII[: len(blurred)]
    return chosen


def batches_of(folder: Path, rank: int = 0, world: int = 1, size: int = 96, **data: object) -> TrainBatches:
    return TrainBatches(
        shards=ShardSet(folder, "train"),
        seed=7,
        image_size=size,
        global_batch_size=BATCH,
        batch_size=BATCH // world,
        rank=rank,
        world_size=world,
        data=CONFIG.model_copy(update=data),
        augment=DEIT_III,
    )


def test_cpu_pixels_equal_pillow(images: list[Image.Image]) -> None:
    """Guards against an operation, or an order of them, that is not the published one: each of the three with jitter, every level."""
    chosen = cases(80)
    geometry = padded_geometry(*np.full((2, 80), SIZE), np.full((80, CROP_UNIFORMS), 0.9), SIZE, 0.5, "reflect")  # not flipped
    request = BatchRequest(*[np.arange(80)] * 5, geometry, draws={ThreeAugment(True, 0.3): chosen})
    finisher = Finisher(80, SIZE, CONFIG.mean, CONFIG.std, 1)
    for i in range(80):
        picture = images[i % len(images)]
        ours = finisher.flip_and_augment(np.asarray(picture), request, i)
        expected = reference(picture, float(chosen.blur[i]), chosen.ops.op[i], chosen.ops.amount[i])
        np.testing.assert_array_equal(ours, np.asarray(expected), err_msg=f"{i} {chosen.blur[i]} {chosen.ops.op[i]}")
    finisher.close()


@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_graph_pixels_equal_pillow(device: str, images: list[Image.Image]) -> None:
    """Guards against other pixels on a GPU. The blur is exact for each of its radii; a jitter's factor in float32 is one level off
    where Pillow's double is on the other side of a whole level."""
    if device == "gpu" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    count = 4 * len(images)
    chosen = cases(count)
    chosen.ops.op[: count // 2, 1:] = Op.NOTHING  # half of them without jitter: exact
    pixels = np.stack([np.asarray(images[i % len(images)]) for i in range(count)])

    @pipeline_def(batch_size=count, num_threads=2, device_id=None if device == "cpu" else 0, enable_conditionals=True)
    def graph():
        source = fn.external_source(source=lambda: pixels, batch=True, layout="HWC", dtype=types.UINT8, ndim=3, device=device)
        inputs = fn.external_source(
            source=lambda: (chosen.blur, box_weights(chosen.blur), chosen.ops.op, chosen.ops.amount),
            num_outputs=4,
            batch=True,
            dtype=[types.FLOAT, types.FLOAT, types.INT32, types.FLOAT],
            ndim=[0, 2, 1, 1],
        )
        return ThreeAugment(True, 0.3).in_graph(source, *inputs)

    built = graph()
    built.build()
    (output,) = built.run()
    for i, ours in enumerate(np.array(output.as_cpu().as_tensor()).astype(int)):
        expected = reference(Image.fromarray(pixels[i]), float(chosen.blur[i]), chosen.ops.op[i], chosen.ops.amount[i])
        difference = np.abs(ours - np.asarray(expected))
        jittered = chosen.ops.op[i, 1:].any()
        assert difference.max() <= (3 if jittered else 0), (i, chosen.blur[i], chosen.ops.op[i])
        assert (difference > 0).mean() <= (0.01 if jittered else 0), (i, chosen.ops.op[i], chosen.ops.amount[i])


def test_the_blurs_weights_are_pillows() -> None:
    """Guards against weights that are right for some radii only, and a Pillow whose blur is another: sums in whole numbers."""
    rng = np.random.default_rng(0)
    picture = Image.fromarray(rng.integers(0, 256, (23, 37, 3)).astype(np.uint8))
    radii = np.concatenate([RADII, rng.uniform(0.1, 2, 100).astype(np.float32)])
    for radius, (high, low) in zip(radii.tolist(), box_weights(radii).astype(np.int64)):
        pixels = np.asarray(picture).astype(np.int64)
        for axis in (1, 1, 1, 0, 0, 0):
            ends = np.clip(np.arange(-2, pixels.shape[axis] + 2), 0, pixels.shape[axis] - 1)  # the border's pixels repeated
            windows = np.lib.stride_tricks.sliding_window_view(pixels.take(ends, axis), 5, axis)  # (H, W, 3, taps)
            pixels = (windows @ (4096 * high + low) + 2**23) >> 24
        np.testing.assert_array_equal(pixels, np.asarray(picture.filter(ImageFilter.GaussianBlur(radius))), err_msg=str(radius))


def test_the_three_are_drawn_equally_often() -> None:
    """Guards against other frequencies, ranges, an order of the jitter that is fixed, and draws that hang together."""
    count = 120_000
    chosen = drawn(count)
    first, margin = chosen.ops.op[:, 0], 5 * np.sqrt(2 / 9 / count)
    for part in (first == Op.COLOR, first == Op.SOLARIZE, chosen.blur > 0):
        assert abs(part.mean() - 1 / 3) < margin
    assert not ((first != Op.NOTHING) & (chosen.blur > 0)).any()
    assert set(chosen.ops.amount[first == Op.SOLARIZE, 0]) == {128} and set(chosen.ops.amount[first == Op.COLOR, 0]) == {0}
    radius = np.sort(chosen.blur[chosen.blur > 0])
    assert np.abs((radius - 0.1) / 1.9 - np.linspace(0, 1, len(radius))).max() < 2 / np.sqrt(
        len(radius)
    )  # uniform (Kolmogorov)
    for order in permutations((Op.BRIGHTNESS, Op.CONTRAST, Op.COLOR)):
        assert abs((chosen.ops.op[:, 1:] == order).all(axis=1).mean() - 1 / 6) < margin
    for op in (Op.BRIGHTNESS, Op.CONTRAST, Op.COLOR):
        factor = chosen.ops.amount[:, 1:][chosen.ops.op[:, 1:] == op]
        assert np.abs((np.sort(factor) - 0.7) / 0.6 - np.linspace(0, 1, count)).max() < 2 / np.sqrt(count)
        assert abs(np.corrcoef(factor, chosen.blur > 0)[0, 1]) < 5 / np.sqrt(count)


def test_either_part_alone() -> None:
    """Guards against jitter where only the three are asked for, and the other way round."""
    three, jitter = drawn(1000, jitter=0.0), drawn(1000, one_of_three=False)
    assert not three.ops.op[:, 1:].any() and three.blur.any()
    assert not jitter.ops.op[:, 0].any() and not jitter.blur.any() and jitter.ops.op[:, 1:].all()


def test_the_simple_crop_is_resize_pad_crop(imagenet_samples: Path) -> None:
    """Guards against another size, a border that is repeated instead of mirrored, and a crop that misses a corner or is not uniform.

    PyTorch's resize is a level off Pillow's in some values; where the short side has its size already, nothing differs.
    """
    files = sorted(imagenet_samples.glob("*/*.JPEG"))[::40]
    size, rng = 64, np.random.default_rng(0)
    pictures = [Image.open(file).convert("RGB") for file in files]
    for picture in [
        *pictures,
        pictures[0].resize((size, 91)),
        pictures[1].resize((70, size)),
        pictures[2].resize((size, size)),
    ]:
        numbers = rng.random((5, CROP_UNIFORMS))
        numbers[:2, -3:-1] = [[0, 0], [1 - 2**-32, 1 - 2**-32]]  # both far corners
        geometry = padded_geometry(*(np.full(5, side) for side in picture.size[::-1]), numbers, size, 0.5, "reflect")
        for i in range(5):
            room = geometry.resize[i] + 8 - size
            top, left = np.rint(geometry.crop[i] * room).astype(int).tolist()
            assert (top, left) == tuple((numbers[i, -3:-1] * (room + 1)).astype(int))
            ours = resize_and_crop(torch.from_numpy(np.array(picture)), geometry, i, size)
            difference = np.abs(ours.astype(int) - np.asarray(simple_crop(picture, size, top, left)))
            if min(picture.size) == size:
                assert not difference.any()
            assert difference.max() <= 2 and (difference > 0).mean() < 0.02
        assert not (geometry.crop[0].any() or (geometry.crop[1] != 1).any())


def test_a_strip_is_cropped_before_it_is_resized() -> None:
    """Guards against gigabytes for an image of 60,000 x 2 pixels."""
    geometry = padded_geometry(np.array([2]), np.array([60_000]), np.full((1, CROP_UNIFORMS), 0.5), 224, 0.5, "reflect")
    assert geometry.shape.tolist() == [[2, 32]] and geometry.resize.tolist() == [[224, 3584]]


@pytest.mark.parametrize("crop", ["simple", "padded"])
def test_the_graph_for_gpus_gives_the_pixels_that_the_cpu_gets(imagenet_shards: Path, crop: str) -> None:
    """Guards against a GPU run that sees other images: both padded crops, flip, 3-Augment and jitter in DALI's whole graph, on the CPU.

    The resizes differ by up to two levels, which solarization makes up to 255 where it decides otherwise.
    """
    batches = batches_of(imagenet_shards, train_crop=crop)
    request = batches.request(0)
    inputs = full_inputs(list(map(batches.shards.read, request.index)), request)
    graph = full_graph(lambda: inputs, batches, None, 1, 1)
    (output,) = graph.run()
    whole = Normalization(CONFIG.mean, CONFIG.std)(torch.from_dlpack(output.as_tensor()).permute(0, 3, 1, 2))
    loader = Loader(batches, CONFIG, torch.device("cpu"))
    split = next(loader).images
    loader.close()
    levels = ((whole - split) * torch.tensor(CONFIG.std)[:, None, None] * 255).abs()  # (B, 3, S, S)
    solarized = torch.from_numpy(request.drawn(ThreeAugment).ops.op[:, 0] == Op.SOLARIZE)
    assert levels[~solarized].max() < 5 and levels.mean() < 0.1
    assert (levels[solarized] > 5).float().mean() < 0.002


def test_a_sample_is_the_same_on_two_ranks(imagenet_shards: Path) -> None:
    """Guards against draws that depend on the world size, and digests that leave the blur out."""
    whole = batches_of(imagenet_shards, train_crop="simple").request(3)
    parts = [batches_of(imagenet_shards, rank, 2, train_crop="simple").request(3) for rank in (0, 1)]
    for ours, first, second in zip(*(augmentation_digests(each) for each in (whole, *parts)), strict=False):
        assert ours == first != second
    blur = whole.drawn(ThreeAugment).blur
    assert np.array_equal(blur, np.concatenate([part.drawn(ThreeAugment).blur for part in parts]))
    digests = augmentation_digests(whole)
    blur[0] += 0.5
    changed = augmentation_digests(whole)
    assert changed[0] != digests[0] and changed[1:] == digests[1:]


def test_other_draws_stay_as_they_are(imagenet_shards: Path) -> None:
    """Guards against 3-Augment taking numbers of the crop, the flip or the mixing: those of batches without it are the same."""
    ours, plain = batches_of(imagenet_shards), batches_of(imagenet_shards)
    object.__setattr__(plain, "augment", AugmentConfig())
    with_it, without = ours.request(1), plain.request(1)
    for name in ("start", "shape", "resize", "crop", "flip"):
        np.testing.assert_array_equal(getattr(with_it.geometry, name), getattr(without.geometry, name))
    assert not without.draws and without.geometry.pad_mode is None
