"""Arrays reach a device in one copy, and the loader works in a thread of its own on any device."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.config import AugmentConfig, DataConfig
from pipeline.loader import loader as loader_module
from pipeline.loader.batches import TrainBatches
from pipeline.loader.dali_graph import REGIONS
from pipeline.loader.decoder import Decoder
from pipeline.loader.device_stream import DeviceStream, pack, unpack, upload
from pipeline.loader.loader import Loader
from pipeline.loader.reader import BadSamples, Reader
from pipeline.shards.shard_set import ShardSet

ARRAYS = [
    np.arange(7, dtype=np.int64),
    np.array([True, False, True]),
    np.linspace(0, 1, 15, dtype=np.float32).reshape(5, 3),
    np.zeros((0, 4), dtype=np.float32),
    np.array([2**62], dtype=np.int64),
    np.arange(12, dtype=np.int64).reshape(3, 4).T,  # not contiguous
]


def batches_of(shards: Path, augment: AugmentConfig) -> TrainBatches:
    return TrainBatches(
        shards=ShardSet(shards, "train"),
        seed=1,
        image_size=32,
        global_batch_size=8,
        batch_size=8,
        data=DataConfig(),
        augment=augment,
    )


def test_packed_arrays_come_out_as_they_went_in() -> None:
    """Guards against labels read from the bytes of weights, and against types that begin at an odd address."""
    packed = pack(ARRAYS)
    out = unpack(packed, ARRAYS)
    for tensor, values in zip(out, ARRAYS):
        assert np.array_equal(tensor.numpy(), values) and tensor.numpy().dtype == values.dtype
        assert tensor.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()
        assert tensor.storage_offset() * tensor.element_size() % 16 == 0
    assert all(np.array_equal(a.numpy(), b) for a, b in zip(upload(ARRAYS, torch.device("cpu")), ARRAYS))


def test_a_cpu_has_no_stream_and_nothing_to_wait_for() -> None:
    """Guards against a hand-over that needs CUDA where there is none: the loader takes the same way on both."""
    stream = DeviceStream(torch.device("cpu"))
    with stream.work():
        made = torch.ones(3)
    done = stream.done()
    stream.receive([made], done)
    assert stream.cuda is None and done is None


def test_batches_are_made_beside_the_thread_that_takes_them(digits_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against feeding, decoding or augmenting in the time of a training step."""
    threads, others = set(), {thread.ident for thread in threading.enumerate()}  # another test's loader may still be at work
    plain = loader_module.augmented
    monkeypatch.setattr(loader_module, "augmented", lambda *args: threads.add(threading.get_ident()) or plain(*args))
    loader = Loader(batches_of(digits_shards, AugmentConfig()), DataConfig(num_threads=1), torch.device("cpu"))
    for _ in range(4):
        next(loader)
    loader.close()
    assert len(threads - others) == 1 and threading.get_ident() not in threads


@pytest.mark.parametrize("augment", [AugmentConfig(), AugmentConfig(rand_augment_ops=2)])
def test_a_batch_of_the_whole_graph_outlives_later_ones(augment: AugmentConfig, digits_shards: Path) -> None:
    """Guards against batches that share DALI's memory, which DALI uses again; here its whole graph runs on the CPU."""
    config = DataConfig(num_threads=1)
    batches = batches_of(digits_shards, augment)

    def start() -> tuple[Reader, Decoder]:
        reader = Reader(batches, BadSamples(batches.shards, 0), 0, config.read_ahead)
        return reader, Decoder(reader, REGIONS, DeviceStream(torch.device("cpu")), 1, config.prefetch)

    (reader, decoder), (other_reader, other) = start(), start()
    kept = [decoder.pixels()[1] for _ in range(8)]
    for encoded, pixels in (other.pixels() for _ in range(8)):
        assert torch.equal(kept.pop(0), pixels) and pixels.shape == (8, 3, 32, 32) and pixels.dtype == torch.uint8
        assert np.array_equal(encoded.request.index, batches.request(encoded.number).index)
    for part in (decoder, other, reader, other_reader):
        part.close()
