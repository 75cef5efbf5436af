"""An augmentation in a file of its own: its draw, both forms of its pixels, the digest and the loader, without being named elsewhere."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import nvidia.dali.fn as fn
import pytest
import torch
from PIL import Image

from pipeline import augment
from pipeline.augment import BatchAugmentation, BatchRequest, PixelAugmentation, Places, register, stream_number
from pipeline.augment.erasing import RandomErasing
from pipeline.config import AugmentConfig, DataConfig
from pipeline.errors import UserError
from pipeline.loader.batches import TrainBatches
from pipeline.loader.dali_graph import full_graph, full_inputs
from pipeline.loader.loader import Loader, augmented
from pipeline.loader.reader import BadSamples, Reader
from pipeline.logs.run_files import augmentation_digests
from pipeline.shards.shard_set import ShardSet
from pipeline.stream.philox import Stream
from support.batches import train_batches

BATCH, SIZE = 24, 48
DATA = DataConfig(num_threads=1, crop_scale=(1.0, 1.0), crop_ratio=(1.0, 1.0), flip=0.0)


@dataclass(frozen=True)
class Swapped:
    swap: np.ndarray  # (B,) bool


@dataclass(frozen=True)
class ChannelSwap(PixelAugmentation):
    """Exchanges red and blue in some images."""

    share: float
    stream = "channel_swap"
    place = 5

    @classmethod
    def from_config(cls, augment: AugmentConfig, data: DataConfig, image_size: int) -> ChannelSwap | None:
        return cls(0.5)

    @property
    def graph_types(self) -> tuple[tuple[type, int], ...]:
        return ((np.bool_, 0),)

    def draw(self, places: Places) -> Swapped:
        return Swapped(places.uniforms(self.stream, 1)[:, 0] < self.share)

    def applies(self, request: BatchRequest, i: int) -> bool:
        return bool(request.draws[self].swap[i])

    def on_picture(self, picture: Image.Image, request: BatchRequest, i: int) -> Image.Image:
        return Image.merge("RGB", picture.split()[::-1])

    def in_graph(self, images, *inputs):
        if inputs[0]:
            images = fn.cat(images[:, :, 2:3], images[:, :, 1:2], images[:, :, 0:1], axis=2)
        return images


@dataclass(frozen=True)
class Gain:
    factor: np.ndarray  # (B,) float64


@dataclass(frozen=True)
class RandomGain(BatchAugmentation):
    """Multiplies normalized images."""

    strength: float
    stream = "random_gain"
    place = 15

    @classmethod
    def from_config(cls, augment: AugmentConfig, data: DataConfig, image_size: int) -> RandomGain | None:
        return cls(2.0)

    def draw(self, places: Places) -> Gain:
        return Gain(1 + self.strength * places.uniforms(self.stream, 1)[:, 0])

    def apply_(self, images: torch.Tensor, request: BatchRequest) -> None:
        images *= torch.from_numpy(request.draws[self].factor).to(images)[:, None, None, None]


def batches_of(shards: Path) -> TrainBatches:
    shard_set = ShardSet(shards, "train")
    return train_batches(
        shard_set, global_batch=BATCH, micro_batch=BATCH, image_size=SIZE, data=DATA, augment=AugmentConfig(erasing=0.3)
    )


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two beside those of the package."""
    known = augment._all()
    monkeypatch.setattr(augment, "_registered", [*augment._registered])
    for kind in (ChannelSwap, RandomGain):
        register(kind)
    ordered = sorted([*known, ChannelSwap, RandomGain], key=lambda kind: (issubclass(kind, BatchAugmentation), kind.place))
    monkeypatch.setattr(augment, "_all", lambda: ordered)


def test_an_augmentation_needs_its_own_file_only(
    registered: None, imagenet_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a stage that names augmentations: pixels of the loader and of the graph, whole batches, digests, order."""
    batches, config = batches_of(imagenet_shards), DATA
    swap, erasing, gain = batches.augmentations
    assert [type(each) for each in batches.augmentations] == [ChannelSwap, RandomErasing, RandomGain]
    request = batches.request(0)
    swapped, factor = request.drawn(ChannelSwap).swap, request.drawn(RandomGain).factor
    assert 4 < swapped.sum() < 20 and len(set(factor)) == BATCH
    loader = Loader(batches, config, torch.device("cpu"))
    ours = next(loader).images
    loader.close()
    inputs = full_inputs(Reader(batches, BadSamples(batches.shards, 0), 0, 1).read(0).images, request)
    (output,) = full_graph(lambda: inputs, batches, None, 1, 1).run()
    graph = torch.from_dlpack(output.as_tensor()).permute(0, 3, 1, 2).clone()  # (B, 3, S, S)

    monkeypatch.setattr(augment, "_all", lambda: [RandomErasing])
    plain = batches_of(imagenet_shards)
    bare = plain.request(0)
    loader = Loader(plain, config, torch.device("cpu"))
    before = next(loader).images
    loader.close()
    (output,) = full_graph(lambda: inputs[:-1], plain, None, 1, 1).run()
    expected = torch.from_dlpack(output.as_tensor()).permute(0, 3, 1, 2).clone()
    expected[swapped] = expected[swapped].flip(1)
    assert torch.equal(graph, expected)
    mean, std = (torch.tensor(values)[:, None, None] for values in (DATA.mean, DATA.std))
    outside = torch.ones(BATCH, 1, SIZE, SIZE, dtype=torch.bool)
    for i, (top, left, height, width) in enumerate(request.drawn(RandomErasing).box.tolist()):
        outside[i, :, top : top + height, left : left + width] = False
    levels = before * std + mean
    levels[swapped] = levels[swapped].flip(1)
    gains = torch.from_numpy(factor).float()[:, None, None, None]
    torch.testing.assert_close(ours * outside, (levels - mean) / std * gains * outside, atol=1e-5, rtol=1e-5)

    whole = before.clone()
    augmented(whole, replace(bare, draws={gain: request.draws[gain]}), at_once=True)
    assert torch.equal(whole, before * gains)
    digests = augmentation_digests(request)
    request.drawn(ChannelSwap).swap[3] ^= 1
    assert [i for i in range(BATCH) if augmentation_digests(request)[i] != digests[i]] == [3]
    assert not set(digests) & set(augmentation_digests(bare))


def test_those_of_other_files_are_imported_with_their_settings(imagenet_shards: Path) -> None:
    """Guards against an augmentation in no folder of ours that a way of decoding leaves out, or the order of application."""
    theirs = {"support.their_augs:Brightness": {"strength": 2}, "support.their_augs:Posterize": {"least": 2}}
    batches = train_batches(
        ShardSet(imagenet_shards, "train"),
        global_batch=BATCH,
        micro_batch=BATCH,
        image_size=SIZE,
        data=DATA,
        augment=AugmentConfig(erasing=0.1, imported=theirs),
    )
    posterize, _, brightness = batches.augmentations
    assert (posterize.least, brightness.strength) == (2, 2) and isinstance(batches.augmentations[1], RandomErasing)
    request = batches.request(0)
    inputs = full_inputs(Reader(batches, BadSamples(batches.shards, 0), 0, 1).read(0).images, request)
    (output,) = full_graph(lambda: inputs, batches, None, 1, 1).run()
    graph, mask = np.array(output.as_tensor()), request.draws[posterize].mask
    assert len(set(mask)) > 3 and all(not (image & ~bits).any() for image, bits in zip(graph, mask))
    loader = Loader(batches, DATA, torch.device("cpu"))
    images = next(loader).images - torch.from_numpy(request.draws[brightness].value).float()[:, None, None, None]
    loader.close()
    levels = ((images * torch.tensor(DATA.std)[:, None, None] + torch.tensor(DATA.mean)[:, None, None]) * 255).permute(
        0, 2, 3, 1
    )
    whole = [i for i, box in enumerate(request.drawn(RandomErasing).box) if not box.any()]
    assert np.mean(np.abs(levels.numpy() - graph)[whole] < 0.01) > 0.9, "the same bits; a level apart at some"


@pytest.mark.parametrize(
    ("path", "settings", "sentence"),
    [
        ("support.their_augs:Gone", {}, "augment.imported must be a class that can be imported, as module:Class, got support.their_augs:Gone"),
        ("support.their_augs:np", {}, "support.their_augs:np with {} is no augmentation (TypeError: issubclass() arg 1 must be a class)"),
        ("support.their_nets:Net", {}, "(TypeError: it is no subclass of pipeline.augment.PixelAugmentation or BatchAugmentation)"),
        ("support.their_augs:Posterize", {"most": 3}, "unexpected keyword argument 'most'): correct it, or remove it from augment.imported."),
        ("support.their_augs:HalfDone", {}, "is no augmentation ("),
        ("support.their_augs:Sequential", {"strength": 1}, "draws for an image depends on other images, or on a generator of its own)"),
    ],
)  # fmt: skip
def test_what_is_no_augmentation_is_one_sentence(path: str, settings: dict, sentence: str) -> None:
    """Guards against images that differ between numbers of processes, and an error in the loader's threads."""
    with pytest.raises(UserError, match=re.escape(sentence)):
        augment.active(AugmentConfig(imported={path: settings}), DATA, SIZE)


def test_streams_of_random_numbers_are_apart() -> None:
    """Guards against two augmentations that draw the same numbers, and a name that falls on a number in use."""
    numbers = [stream_number(kind.stream) for kind in augment._all()]
    assert len(set(numbers)) == len(numbers) >= 4
    assert all(256 <= stream_number(name) < 1 << 16 for name in ("channel_swap", "random_gain", "", "x" * 99))
    assert max(Stream) < 256 and stream_number(Stream.ERASING) == 6 and stream_number("channel_swap") == 43_039
    places = Places(7, np.zeros(5), np.arange(5), np.arange(5), 1)
    assert (places.uniforms("channel_swap", 3) != places.uniforms("random_gain", 3)).all()


def test_a_stream_in_use_is_refused(registered: None) -> None:
    """Guards against an augmentation copied from another with its stream."""

    class Copy(ChannelSwap):
        pass

    with pytest.raises(ValueError, match="the stream of Copy must differ from that of ChannelSwap"):
        register(Copy)
