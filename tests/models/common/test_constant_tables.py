"""Constant tables are computed once, and never with values that are none."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeline.models import create_model
from pipeline.models.common.layers import constant_table


def test_a_table_is_computed_once_for_each_size() -> None:
    """Guards against tables that are computed in every step, and against tables that a training step cannot use."""
    calls = []

    @constant_table
    def squares(count: int) -> torch.Tensor:
        calls.append(count)
        return torch.arange(count) ** 2

    with torch.inference_mode():
        first = squares(3)
    assert squares(3) is first and squares(4).tolist() == [0, 1, 4, 9] and calls == [3, 4]
    assert not first.is_inference()


@pytest.mark.parametrize("name", ["convit_ti", "pervit_t", "posmlp_t", "lsat_t_224"])
def test_a_call_with_fake_tensors_leaves_no_trace(name: str) -> None:
    """Guards against tables without values in a model that was exported, or compiled, earlier in the same process."""
    torch.manual_seed(0)
    model = create_model(name, num_classes=10, image_size=96 if name != "lsat_t_224" else 224).eval()
    images = torch.rand(1, 3, *([224] * 2 if name == "lsat_t_224" else [96] * 2))
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model(mode.from_tensor(images))
    with torch.no_grad():
        scores = model(images)
    assert type(scores) is torch.Tensor and scores.isfinite().all()
