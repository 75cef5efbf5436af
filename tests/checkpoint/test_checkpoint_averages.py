"""Averages of weights and of BatchNorm's statistics in a checkpoint, and checkpoints from before the latter."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.checkpoint import read_weights, step_folder
from pipeline.checkpoint.loading import load
from pipeline.checkpoint.snapshot import saved_tensors
from pipeline.checkpoint.whole import Seen, Verified
from pipeline.distributed.world import World
from pipeline.optim.ema import WeightAverage
from support.checkpoints import save


@pytest.fixture
def alone() -> Iterator[World]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield World(0, 1, torch.device("cpu"), 1)
    dist.destroy_process_group()


class PlainEngine:
    """An engine of one process, as ZeRO 0 has it."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.module = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
        self.optimizer = torch.optim.AdamW(self.module.parameters())

    def zero_optimization_stage(self) -> int:
        return 0

    def empty_partition_cache(self) -> None: ...


def trained() -> tuple[PlainEngine, WeightAverage]:
    """A model after three steps, and its averages."""
    engine = PlainEngine(seed=0)
    average = WeightAverage(engine, 0.9)  # type: ignore[arg-type]
    for _ in range(3):
        engine.module(torch.randn(8, 3, 2, 2) + 3).square().mean().backward()
        engine.optimizer.step()
        average.update()
    return engine, average


def saved(folder: Path, tensors: dict[str, Tensor], model: nn.Module) -> Verified:
    """A checkpoint of these tensors."""
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    manifest = save(folder, [tensors], shapes)
    return Verified(folder, manifest, Seen.look(folder, manifest.files))


@pytest.mark.parametrize("former", [False, True])
def test_averaged_statistics_return_from_a_checkpoint(
    former: bool, alone: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against averaged weights that go on, or are evaluated, with other statistics than those averaged with them. A
    checkpoint of an earlier version has none: they begin with the model's, and the log says so."""
    engine, average = trained()
    tensors = saved_tensors(engine, average, alone)  # type: ignore[arg-type]
    own = {name: value.clone() for name, value in average.models_buffers().items()}
    if former:
        tensors = {key: value for key, value in tensors.items() if not key.startswith("ema_buffer/")}
    verified = saved(step_folder(tmp_path, 4), tensors, engine.module)

    other = PlainEngine(seed=1)
    found = WeightAverage(other, 0.9)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO, logger="pipeline"):
        load(other, verified, found, alone)  # type: ignore[arg-type]
    said = [record.message for record in caplog.records]
    assert all(torch.equal(found.averages[name], value) for name, value in average.averages.items())
    expected = own if former else average.buffers
    assert expected.keys() == found.buffers.keys() == {"1.running_mean", "1.running_var"}
    assert all(torch.equal(found.buffers[name], value) for name, value in expected.items())
    assert not torch.equal(own["1.running_mean"], average.buffers["1.running_mean"])
    assert (len(said) == 1 and "has no averages of the model's buffers" in said[0]) if former else said == []

    weights = read_weights(tmp_path)
    assert weights.ema is not None and weights.default == "ema"
    assert all(torch.equal(weights.ema[name], value) for name, value in {**average.averages, **expected}.items())
    assert all(torch.equal(weights.model[name], value) for name, value in own.items())
    assert int(weights.ema["1.num_batches_tracked"]) == 3
