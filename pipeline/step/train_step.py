"""Take a training step: forward and backward passes of its micro-batches, then the optimizer, the weight average and BatchNorm."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.augment import BatchRequest
from pipeline.loader.loader import Batch
from pipeline.metrics import record
from pipeline.models.common.base import VisionModel
from pipeline.optim.averages import StepStatistics, WeightAverage
from pipeline.optim.engine import Engine, micro_batches, optimizer_step, set_learning_rate
from pipeline.step.forward import sample_noise
from pipeline.step.loss import Objective, spread_nonfinite


@dataclass
class TrainState:
    """What is trained."""

    engine: Engine[VisionModel]  # the model and its optimizer
    batchnorm: StepStatistics
    ema: WeightAverage | None
    objective: Objective


@dataclass(frozen=True)
class StepResult:
    """What a step has found.

    Attributes:
        requests: of this rank's micro-batches.
        losses: of the same, () each.
        batch: the last micro-batch.
        grad_norm: over all ranks, before clipping; not finite if the step was skipped.
    """

    requests: list[BatchRequest]
    losses: list[Tensor]
    batch: Batch
    grad_norm: float | Tensor

    @property
    def taken(self) -> bool:
        """Whether the step changed weights and statistics, the same on all ranks."""
        return math.isfinite(self.grad_norm)

    @property
    def loss(self) -> Tensor:
        """(), the mean of this rank's micro-batches."""
        return torch.stack(self.losses).mean()


def train_step(
    state: TrainState,
    next_batch: Callable[[], Batch],
    lr: float,
    seed: int,
    before_forward: Callable[[Batch, Tensor | None], None] | None = None,
    count: int | None = None,
) -> StepResult:
    """Take one optimizer step; a gradient that is not finite changes nothing, on any rank. Collective.

    Args:
        state: with its engine in training mode.
        seed: of the run, for :func:`sample_noise`.
        before_forward: called with each micro-batch and its noise.
        count: end the step after so many micro-batches; None: after those of the config.
    """
    engine, grad_norm = state.engine, None
    requests, losses = [], []
    set_learning_rate(engine, lr)
    state.batchnorm.begin()
    for number in micro_batches(engine, count):
        asked = time.perf_counter()
        batch = next_batch()
        record("data_wait", time.perf_counter() - asked, reduce="slowest")
        record("replaced", batch.replaced, reduce="sum")
        noise = sample_noise(engine.module, batch, seed)
        if before_forward:
            before_forward(batch, noise)
        state.batchnorm.micro_batch(number)
        loss = forward_backward(engine, engine.backward, batch, noise, state.objective)
        grad_norm = optimizer_step(engine)
        requests.append(batch.request)
        losses.append(loss)
    assert grad_norm is not None  # the last micro-batch completes the step
    result = StepResult(requests, losses, batch, grad_norm)
    record("loss", result.loss)
    record("lr", lr, reduce="max")
    record("grad_norm", grad_norm, reduce="max")
    state.batchnorm.end(result.taken)
    if state.ema and result.taken:
        state.ema.update()
    return result


def forward_backward(
    forward: Callable[[Tensor, Tensor | None], Tensor],
    backward: Callable[[Tensor], Any],
    batch: Batch,
    noise: Tensor | None,
    objective: Objective,
) -> Tensor:
    """Run the forward pass of a micro-batch, its loss and its backward pass. Collective with an engine.

    Returns the loss without its graph, () float32.

    Args:
        forward: images (B, 3, H, W) and noise -> scores (B, classes); the engine, or a model under autocast.
        backward: computes the gradients of a loss, ().
        noise: what the model takes besides: (B, noise_per_sample), or None.
    """
    loss = objective(forward(batch.images, noise), batch)
    backward(spread_nonfinite(loss))
    return loss.detach()
