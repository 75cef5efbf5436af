"""The weight average."""

from __future__ import annotations

import torch
from torch import nn

from pipeline.optim.averages import WeightAverage


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
