"""Averages of weights and of BatchNorm's statistics in a checkpoint, and a checkpoint without them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.checkpoint.folder import step_folder
from pipeline.checkpoint.loading import Verified, load
from pipeline.checkpoint.parts import read_headers
from pipeline.checkpoint.rank_slices import optimizer_state, saved_tensors
from pipeline.checkpoint.weights import read_weights
from pipeline.cluster.world import World
from pipeline.config import config_from_dict
from pipeline.optim.averages import WeightAverage
from pipeline.optim.plain_engine import PlainEngine
from support.checkpoints import save


@pytest.fixture
def alone() -> Iterator[World]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield World(0, 1, torch.device("cpu"), 1)
    dist.destroy_process_group()


def plain_engine(world: World, seed: int) -> PlainEngine:
    """An engine of one process."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    names, parameters = zip(*module.named_parameters())
    optimizer = torch.optim.AdamW([{"params": parameters, "names": names}], fused=True)
    config = config_from_dict({"train": {"micro_batch_size": 8, "global_batch_size": 8, "precision": "fp32"}}, "the test")
    return PlainEngine(module, optimizer, True, config, world)


def trained(world: World) -> tuple[PlainEngine, WeightAverage]:
    """A model after three steps, and its averages."""
    engine = plain_engine(world, seed=0)
    average = WeightAverage(engine, 0.9)  # type: ignore[arg-type]
    for _ in range(3):
        engine.backward(engine(torch.randn(8, 3, 2, 2) + 3).square().mean())
        engine.update()
        average.update(taken=True)
    return engine, average


def saved(folder: Path, tensors: dict[str, Tensor], engine: PlainEngine) -> Verified:
    """A checkpoint of these tensors."""
    shapes = {name: list(parameter.shape) for name, parameter in engine.module.named_parameters()}
    manifest = save(folder, [tensors], shapes, optimizer_state=optimizer_state(engine))  # type: ignore[arg-type]
    return Verified(folder, manifest, read_headers(folder, manifest.files))


@pytest.mark.parametrize("averaged", [True, False])
def test_averaged_statistics_return_from_a_checkpoint(averaged: bool, alone: World, tmp_path: Path) -> None:
    """Guards against averaged weights that go on, or are evaluated, with other statistics than those averaged with them. Where the
    checkpoint has no averages they begin with the weights and statistics."""
    engine, average = trained(alone)
    tensors = saved_tensors(engine, average, alone)  # type: ignore[arg-type]
    own = {name: value.clone() for name, value in average.models_buffers().items()}
    if not averaged:
        tensors = {key: value for key, value in tensors.items() if not key.startswith("ema")}
    verified = saved(step_folder(tmp_path, 4), tensors, engine)

    other = plain_engine(alone, seed=1)
    found = WeightAverage(other, 0.9)  # type: ignore[arg-type]
    load(other, verified, found, alone)  # type: ignore[arg-type]
    plain = {name: parameter.detach() for name, parameter in engine.module.named_parameters()}
    weights_of_average = average.averages if averaged else plain
    assert all(torch.equal(found.averages[name], value) for name, value in weights_of_average.items())
    expected = average.buffers if averaged else own
    assert expected.keys() == found.buffers.keys() == {"1.running_mean", "1.running_var"}
    assert all(torch.equal(found.buffers[name], value) for name, value in expected.items())
    assert not torch.equal(own["1.running_mean"], average.buffers["1.running_mean"])
    kept, found_state = (which.optimizer.state[which.optimizer.param_groups[0]["params"][0]] for which in (engine, other))
    assert kept.keys() == found_state.keys() == {"step", "exp_avg", "exp_avg_sq"} and kept["step"] == 3
    assert all(torch.equal(found_state[key], kept[key]) for key in kept)

    weights = read_weights(tmp_path)
    assert all(torch.equal(weights.model[name], value) for name, value in own.items())
    if not averaged:
        assert weights.ema is None and weights.default == "model"
        return
    assert weights.ema is not None and weights.default == "ema"
    assert all(torch.equal(weights.ema[name], value) for name, value in {**average.averages, **expected}.items())
    assert int(weights.ema["1.num_batches_tracked"]) == 3
