"""The form in which the loader hands images to a model on a GPU."""

from __future__ import annotations

import pytest
import torch

from pipeline.models import create_model
from pipeline.step.precision import autocast


@pytest.mark.parametrize("name", ["pervit_t", "deit_t", "posmlp_t", "gmlp_s"])
def test_images_in_bf16_are_those_of_autocast(name: str) -> None:
    """Guards against a model that computes with its images in fp32 before it begins with the convolution that it promises."""
    torch.manual_seed(0)
    model = create_model(name, num_classes=10, image_size=32).eval()
    assert model.image_format
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad(), autocast(torch.device("cpu"), "bf16"):
        assert torch.equal(model(images.to(torch.bfloat16, memory_format=model.image_format)), model(images))
