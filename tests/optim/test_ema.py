"""The weight average."""

from __future__ import annotations

import torch
from torch import nn

from pipeline.optim.ema import WeightAverage


class PlainEngine:
    """An engine that holds everything."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def empty_partition_cache(self) -> None: ...


def test_all_tensors_at_once_give_what_one_by_one_gave() -> None:
    """Guards against an average that another way of calling lerp rounds differently: a resumed run would leave its path."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(37, 5), nn.LayerNorm(5), nn.Linear(5, 1))
    average = WeightAverage(PlainEngine(model), 0.99)  # type: ignore[arg-type]
    expected = {name: value.clone() for name, value in model.named_parameters()}
    for _ in range(3):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.add_(torch.randn_like(parameter))
                expected[name].lerp_(parameter, 1 - 0.99)
        average.update()
    assert average.averages.keys() == expected.keys()
    assert all(torch.equal(average.averages[name], value) for name, value in expected.items())
