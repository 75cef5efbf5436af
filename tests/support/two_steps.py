"""Two optimizer steps, after which a parameter that nothing reaches, or that should be frozen, shows."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def two_steps(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Tensor], labels: list[int]) -> list[Tensor]:
    """Train on two batches and see that the losses are finite.

    Args:
        batches: of images (B, 3, H, W); taken one after the other, so that a generator draws them between the steps.
        labels: B classes, the same for both batches.

    Returns:
        The two losses.
    """
    losses = []
    for images in batches:
        loss = F.cross_entropy(model(images), torch.tensor(labels))
        assert torch.isfinite(loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    assert len(losses) == 2
    return losses
