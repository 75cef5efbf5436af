"""The weight average, and the statistics of BatchNorm."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipeline.cluster.world import World
from pipeline.optim.averages import StepStatistics, WeightAverage


class Holder:
    """An engine that holds everything, in tensors of their own."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def empty_partition_cache(self) -> None: ...


def test_all_tensors_at_once_give_what_one_by_one_gave() -> None:
    """Guards against an average that another way of calling lerp rounds differently: a resumed run would leave its path."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(37, 5), nn.LayerNorm(5), nn.Linear(5, 1))
    average = WeightAverage(Holder(model), 0.99)  # type: ignore[arg-type]
    expected = {name: value.clone() for name, value in model.named_parameters()}
    for _ in range(3):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.add_(torch.randn_like(parameter))
                expected[name].lerp_(parameter, 1 - 0.99)
        average.update(taken=True)
    with torch.no_grad():
        model[0].weight.add_(1)
    average.update(taken=False)  # a skipped step
    average.update(taken=torch.tensor(0.0))
    assert average.buffers == {} and average.averages.keys() == expected.keys()
    assert all(torch.equal(average.averages[name], value) for name, value in expected.items())


def test_statistics_are_averaged_as_weights_are() -> None:
    """Guards against averaged weights that are evaluated with the statistics of others. The reference is the update of timm's
    ModelEma, ``decay * average + (1 - decay) * value`` for every tensor of the state dict; integers are copied in place of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    model[1].register_buffer("derived", torch.ones(2), persistent=False)
    average = WeightAverage(Holder(model), 0.9)  # type: ignore[arg-type]
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(5):
        with torch.no_grad():
            model(torch.randn(8, 3, 2, 2) + 3)
            model[0].weight.add_(0.1)
        average.update(taken=True)
        for name, value in model.state_dict().items():
            expected[name] = 0.9 * expected[name] + (1 - 0.9) * value if value.is_floating_point() else value.clone()
    assert average.buffers.keys() == {"1.running_mean", "1.running_var"}

    own = {name: value.clone() for name, value in model.state_dict().items()}
    assert not torch.allclose(own["1.running_mean"], expected["1.running_mean"], rtol=0.01)
    with average.applied():
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7, msg=name)
        assert int(model.state_dict()["1.num_batches_tracked"]) == 5
    assert all(torch.equal(value, own[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_step_updates_batchnorm_by_the_mean_of_its_micro_batches(micro_batches: int) -> None:
    """Guards against statistics of the last micro-batch alone, a skipped step that leaves some, and a momentum that is not the
    layer's own afterwards. The reference has the formula of BatchNorm (Ioffe & Szegedy, 2015, Algorithm 2)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm2d(4, momentum=0.3))
    statistics = StepStatistics(model, World(0, 1, torch.device("cpu"), 1))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for taken in (True, False, True):
            images = torch.randn(micro_batches, 8, 4, 3, 3) * 2 + 1
            before = {name: buffer.clone() for name, buffer in model.named_buffers()}
            statistics.begin()
            for number, part in enumerate(images):
                statistics.micro_batch(number)
                model(part)
            statistics.end(taken)
            step = {"running_mean": images.mean((1, 3, 4)).mean(0), "running_var": images.var((1, 3, 4)).mean(0)}
            for name, value in step.items():
                expected = before[f"0.{name}"] * (1 - 0.1 * taken) + value * 0.1 * taken
                torch.testing.assert_close(model.get_buffer(f"0.{name}"), expected, rtol=1e-5, atol=1e-6)
            assert model[0].num_batches_tracked == before["0.num_batches_tracked"] + taken
            assert [norm.momentum for norm in model] == [0.1, 0.3]
    finally:
        dist.destroy_process_group()
