"""Cross entropy of images that mix two labels, and how a non-finite loss reaches all ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.data.loader import Batch


def mixed_cross_entropy(
    scores: Tensor, batch: Batch, label_smoothing: float, compute: Callable[..., Tensor] | None = None
) -> Tensor:
    """Mean cross entropy of images that are mixtures of two labels.

    Cross entropy is linear in the target, so mixing two losses is what mixing the two smoothed one-hot vectors is
    (Mixup's equation for the target).

    Args:
        scores: (B, classes), any floating type.
        batch: with ``labels``, ``other_labels`` and ``weight``.
        label_smoothing: share of each target spread over all classes.
        compute: :func:`mixture_of_two`, compiled; None: that function itself.
    """
    return (compute or mixture_of_two)(scores, batch.labels, batch.other_labels, batch.weight, label_smoothing)


def mixture_of_two(scores: Tensor, labels: Tensor, other_labels: Tensor, weight: Tensor, label_smoothing: float) -> Tensor:
    """:func:`mixed_cross_entropy` on plain tensors: scores (B, classes), labels, other labels and weight (B,) -> ()."""
    own, other = (
        F.cross_entropy(scores.float(), each, label_smoothing=label_smoothing, reduction="none")  # (B,)
        for each in (labels, other_labels)
    )
    return (weight * own + (1 - weight) * other).mean()


def spread_nonfinite(loss: Tensor) -> Tensor:
    """The loss unchanged, but a non-finite one gets a NaN gradient, which all ranks see in the gradient norm without another collective."""
    return loss * torch.where(loss.isfinite(), 1.0, torch.nan)
