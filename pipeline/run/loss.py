"""The training loss of images that mix two labels, and how a non-finite loss reaches all ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.config import TrainConfig
from pipeline.data.loader import Batch

# (scores (B, classes), labels (B,), other labels (B,), weight (B,), label smoothing) -> (), float32
LossFunction = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


def training_loss(scores: Tensor, batch: Batch, train: TrainConfig, compute: LossFunction | None = None) -> Tensor:
    """The loss that ``train.loss`` names.

    Args:
        scores: (B, classes), any floating type.
        batch: with ``labels``, ``other_labels`` and ``weight``.
        train: of the run.
        compute: :func:`loss_function` of it, compiled; None: that function itself.

    Returns:
        (), float32.
    """
    function = compute or loss_function(train)
    return function(scores, batch.labels, batch.other_labels, batch.weight, train.label_smoothing)


def loss_function(train: TrainConfig) -> LossFunction:
    """What ``train.loss`` computes, on plain tensors, which ``torch.compile`` takes: :func:`mixture_of_two` or binary cross entropy."""
    if train.loss == "cross_entropy":
        return mixture_of_two

    def binary(scores: Tensor, labels: Tensor, other_labels: Tensor, weight: Tensor, label_smoothing: float) -> Tensor:
        return binary_cross_entropy(scores, labels, other_labels, weight, label_smoothing, train.bce_threshold)

    return binary


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


def binary_cross_entropy(
    scores: Tensor, labels: Tensor, other_labels: Tensor, weight: Tensor, label_smoothing: float, threshold: float | None
) -> Tensor:
    """Mean over images and classes of the binary cross entropy, each class a question of its own (Wightman et al., "ResNet strikes back", 2021).

    DeiT III (Touvron et al., ECCV 2022) asks whether a class is in the picture at all: threshold 0, so that both labels of a mixed
    image count fully. With None, the shares of the mixture are the targets.

    Args:
        scores: (B, classes), any floating type.
        labels, other_labels: (B,) int64.
        weight: (B,) share of ``labels`` in the target.
        label_smoothing: share of each target spread over all classes.
        threshold: targets above it become 1, the others 0; None: they stay as they are.

    Returns:
        (), float32.
    """
    spread = label_smoothing / scores.shape[-1]
    classes = torch.arange(scores.shape[-1], device=scores.device)
    own, other = ((each[:, None] == classes) * (1 - label_smoothing) + spread for each in (labels, other_labels))
    targets = weight[:, None] * own + (1 - weight[:, None]) * other  # (B, classes)
    if threshold is not None:
        targets = (targets > threshold).to(targets.dtype)
    return F.binary_cross_entropy_with_logits(scores.float(), targets)


def spread_nonfinite(loss: Tensor) -> Tensor:
    """The loss unchanged, but a non-finite one gets a NaN gradient, which all ranks see in the gradient norm without another collective."""
    return loss * torch.where(loss.isfinite(), 1.0, torch.nan)
