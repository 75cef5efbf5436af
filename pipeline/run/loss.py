"""Cross entropy of images that mix two labels, and how a non-finite loss reaches all ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.data.loader import Batch


def mixed_cross_entropy(scores: Tensor, batch: Batch, label_smoothing: float) -> Tensor:
    """Mean cross entropy of images that are mixtures of two labels.

    Cross entropy is linear in the target, so mixing two losses is what mixing the two smoothed one-hot vectors is
    (Mixup's equation for the target).

    Args:
        scores: (B, classes), any floating type.
        batch: with ``labels``, ``other_labels`` and ``weight``.
        label_smoothing: share of each target spread over all classes.
    """
    own, other = (
        F.cross_entropy(scores.float(), labels, label_smoothing=label_smoothing, reduction="none")  # (B,)
        for labels in (batch.labels, batch.other_labels)
    )
    return (batch.weight * own + (1 - batch.weight) * other).mean()


def spread_nonfinite(loss: Tensor) -> Tensor:
    """The loss unchanged, but a non-finite one gets a NaN gradient, which all ranks see in the gradient norm without another collective."""
    return loss * torch.where(loss.isfinite(), 1.0, torch.nan)
