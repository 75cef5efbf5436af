"""What a training step does with one micro-batch."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from pipeline.config import TrainConfig
from pipeline.data.loader import Batch
from pipeline.models.common.base import VisionModel
from pipeline.optim.engine import Engine
from pipeline.run.loss import LossFunction, spread_nonfinite, training_loss
from pipeline.run.teacher import hard_distillation_loss


def forward_backward(
    engine: Engine[VisionModel],
    batch: Batch,
    noise: Tensor | None,
    train: TrainConfig,
    teacher: Callable[[Tensor], Tensor] | None = None,
    compute: LossFunction | None = None,
) -> Tensor:
    """Forward pass, loss and backward pass, whose gradients the engine accumulates. Collective.

    Args:
        engine: in training mode.
        batch: of this rank.
        noise: what the model takes besides: (B, noise_per_sample), or None.
        train: which loss.
        teacher: images (B, 3, H, W) -> scores (B, classes); None: no distillation.
        compute: of the loss, compiled; None: it is not.

    Returns:
        (), float32, the loss.
    """
    scores = engine(batch.images, noise)
    loss = training_loss(scores, batch, train, compute)
    if teacher:
        loss = hard_distillation_loss(loss, scores, teacher(batch.images))
    engine.backward(spread_nonfinite(loss))
    return loss
