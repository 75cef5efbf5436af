"""The loader on a CUDA GPU: streams, lifetimes, both ways of decoding. Its arithmetic is tested without one in the other files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.checkpoint.weights import read_weights
from pipeline.config import AugmentConfig, DataConfig
from pipeline.loader.batches import TrainBatches
from pipeline.loader.dali_graph import REGIONS
from pipeline.loader.device_stream import upload
from pipeline.loader.loader import Loader, augmented
from pipeline.loader.reader import BadSamples
from pipeline.loader.trial import TrialLoader, Turns
from pipeline.shards.shard_set import ShardSet
from support import launching
from support.batches import form_of_gpu
from support.launching import run_module

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
EVERYTHING = AugmentConfig(rand_augment_ops=2, erasing=0.5, mixup=0.8, cutmix=1.0)
LONG = 50_000_000  # cycles: some 30 ms, in which the loader makes several batches
BATCHES = 24  # more than all queues hold


def batches_of(shards: Path, augment: AugmentConfig = EVERYTHING, size: int = 64) -> TrainBatches:
    return TrainBatches(
        shards=ShardSet(shards, "train"),
        seed=1,
        image_size=size,
        global_batch_size=32,
        batch_size=32,
        data=DataConfig(),
        augment=augment,
    )


def open_loader(batches: TrainBatches, decode: str, **more: object) -> Loader:
    """On the GPU, in the form in which it decodes."""
    form = REGIONS if decode == "cpu" else form_of_gpu(batches.shards)
    return Loader(batches, config_of(decode), GPU, form=form, **more)


def config_of(decode: str) -> DataConfig:
    return DataConfig(decode=decode, num_threads=2)


def waited_for(loader: Loader) -> list[tuple[Tensor, Tensor]]:
    """Images and labels, with the device at rest after each batch."""
    kept = []
    for _ in range(BATCHES):
        batch = next(loader)
        torch.cuda.synchronize()
        kept.append((batch.images.cpu(), batch.labels.cpu()))
    loader.close()
    return kept


@pytest.mark.parametrize("decode", ["gpu", "cpu"])
def test_a_consumer_far_behind_reads_what_was_made_for_it(decode: str, digits_shards: Path) -> None:
    """Guards against reading a batch before it is complete, and against its memory, or DALI's, being used again while a
    stream that is far behind is yet to read it: the host drops each batch long before the device gets to it."""
    batches, behind = batches_of(digits_shards), torch.cuda.Stream(GPU)
    expected = waited_for(open_loader(batches, decode))
    loader, copies = open_loader(batches, decode), []
    with torch.cuda.stream(behind):
        for _ in range(BATCHES):
            torch.cuda._sleep(LONG)
            batch = next(loader)
            copies.append((batch.images.clone(), batch.labels.clone()))
            del batch
    torch.cuda.synchronize()
    loader.close()
    for number, ((images, labels), (images_then, labels_then)) in enumerate(zip(copies, expected)):
        assert torch.equal(labels.cpu(), labels_then), number
        assert torch.equal(images.cpu(), images_then), number


def test_taking_a_batch_does_not_wait_for_the_device(digits_shards: Path) -> None:
    """Guards against a synchronization in the hand-over: the stream that trains is still busy when the batch is there."""
    loader = open_loader(batches_of(digits_shards), "gpu")
    next(loader)
    torch.cuda.synchronize()
    torch.cuda._sleep(20 * LONG)
    finished = torch.cuda.current_stream().record_event()
    next(loader)
    assert not finished.query()
    loader.close()


def test_pixels_that_the_cpu_decoded_are_those_of_a_run_on_the_cpu(digits_shards: Path) -> None:
    """Guards against data.decode=cpu that augments or normalizes in another way on a GPU; only rounding may differ."""
    batches = batches_of(digits_shards)
    on_cpu, on_gpu = Loader(batches, config_of("cpu"), CPU), Loader(batches, config_of("cpu"), GPU)
    for _ in range(6):
        a, b = next(on_cpu), next(on_gpu)
        assert b.images.device == GPU
        torch.testing.assert_close(b.images.cpu(), a.images, rtol=0, atol=4e-6)
        for name in ("labels", "other_labels", "weight", "valid"):
            assert torch.equal(getattr(b, name).cpu(), getattr(a, name)), name
    on_cpu.close(), on_gpu.close()


def test_a_whole_batch_is_augmented_in_a_few_kernels(digits_shards: Path) -> None:
    """Guards against kernels per image or group, and against erasing and mixing that differ from the CPU's."""
    batches = batches_of(digits_shards)
    request = batches.request(3)
    images = torch.randn(32, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    augmented(images.to(GPU), request)  # the first use loads kernels
    there = images.to(GPU)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        augmented(there, request)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(names) <= 20, names
    torch.testing.assert_close(there.cpu(), augmented(images, request).images, rtol=0, atol=1e-6)


def test_arrays_survive_the_copy_to_a_busy_device() -> None:
    """Guards against pinned memory that is given out again before it was copied."""
    arrays = [[np.full(1000, i), np.full(333, i, dtype=np.float32)] for i in range(50)]
    torch.cuda._sleep(10 * LONG)
    there = [upload(each, GPU) for each in arrays]
    for tensors, values in zip(there, arrays):
        for tensor, expected in zip(tensors, values):
            assert np.array_equal(tensor.cpu().numpy(), expected)


def test_a_trial_on_a_gpu_yields_the_stream(digits_shards: Path) -> None:
    """Guards against a trial that loses or repeats a batch where the two ways of decoding are really two."""
    batches, turns = batches_of(digits_shards, AugmentConfig()), Turns(0, settling=2, measured=2)

    def open_one(numbers: Iterator[int], decode: str, bad: BadSamples) -> Loader:
        return open_loader(batches, decode, start=numbers, bad=bad)

    tried = TrialLoader(batches, turns, BadSamples(batches.shards, 0), open_one, lambda _: "cpu")
    plain = open_loader(batches, "auto")
    for i in range(turns.total + 3):
        a, b = next(tried), next(plain)
        assert np.array_equal(a.request.index, b.request.index), i
        assert (a.images - b.images).abs().mean() * 255 * 0.225 < 2.0, i
    tried.close(), plain.close()


def test_a_run_measures_once_and_keeps_its_choice(
    small_run: Path, digits_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a choice that is not made, not recorded, or made anew by every start."""
    form_of_gpu(ShardSet(digits_shards, "train"))
    plain = launching.clean_environment
    monkeypatch.setattr(launching, "clean_environment", lambda: {**plain(), "CUDA_VISIBLE_DEVICES": "0"})
    first, second = (
        run_module("pipeline.train", "--config", small_run, f"train.max_steps={steps}", "data.num_threads=2").stdout
        for steps in (30, 32)
    )
    assert "in turns for" in first and "from now on: a micro-batch takes" in first
    assert "as this run has done before" in second and "in turns for" not in second
    assert read_weights(tmp_path / "run").state.config["data"]["decode"] in ("gpu", "cpu")
