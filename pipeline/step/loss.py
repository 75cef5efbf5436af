"""Compute the training loss: that of images which mix two labels, and that of a teacher's decision beside it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.config import TrainConfig
from pipeline.errors import UserError
from pipeline.loader.loader import Batch

# (scores (B, classes), labels (B,), other labels (B,), weight (B,)) -> (), float32
LabelLoss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass
class Objective:
    """What a step minimizes."""

    label_loss: LabelLoss  # against the labels; of the function below, or the same compiled
    teacher: Callable[[Tensor], Tensor] | None = None  # images (B, 3, H, W) -> scores (B, classes) without gradients

    def __call__(self, scores: Tensor, batch: Batch) -> Tensor:
        """The loss, () float32, of ``scores`` (B, classes) in any floating type."""
        loss = self.label_loss(scores, batch.labels, batch.other_labels, batch.weight)
        if self.teacher:
            loss = hard_distillation_loss(loss, scores, self.teacher(batch.images))
        return loss


def label_loss(train: TrainConfig) -> LabelLoss:
    """The loss that ``train.loss`` names, on plain tensors, which ``torch.compile`` takes."""
    smoothing, threshold = train.label_smoothing, train.bce_threshold
    if train.loss == "bce":
        return lambda scores, labels, others, weight: binary_cross_entropy(scores, labels, others, weight, smoothing, threshold)
    return lambda scores, labels, others, weight: cross_entropy(scores, labels, others, weight, smoothing)


def cross_entropy(scores: Tensor, labels: Tensor, other_labels: Tensor, weight: Tensor, label_smoothing: float) -> Tensor:
    """Mean cross entropy, () float32, of images that are mixtures of two labels.

    Cross entropy is linear in the target, so mixing two losses is what mixing the two smoothed one-hot vectors is
    (Mixup's equation for the target).

    Args:
        scores: (B, classes), any floating type.
        labels, other_labels: (B,) int64.
        weight: (B,) share of ``labels`` in the target.
    """
    own, other = (
        F.cross_entropy(scores.float(), target, label_smoothing=label_smoothing, reduction="none")  # (B,)
        for target in (labels, other_labels)
    )
    return (weight * own + (1 - weight) * other).mean()


def binary_cross_entropy(
    scores: Tensor, labels: Tensor, other_labels: Tensor, weight: Tensor, label_smoothing: float, threshold: float | None
) -> Tensor:
    """Mean over images and classes, () float32, of the binary cross entropy, each class a question of its own
    (Wightman et al., "ResNet strikes back", 2021).

    Targets above ``threshold`` become 1, the others 0. DeiT III (Touvron et al., ECCV 2022) asks whether a class is in the picture at
    all: threshold 0, so that both labels of a mixed image count fully. With None, the shares of the mixture are the targets.
    """
    spread = label_smoothing / scores.shape[-1]
    classes = torch.arange(scores.shape[-1], device=scores.device)
    own, other = ((target[:, None] == classes) * (1 - label_smoothing) + spread for target in (labels, other_labels))
    targets = weight[:, None] * own + (1 - weight[:, None]) * other  # (B, classes)
    if threshold is not None:
        targets = (targets > threshold).to(targets.dtype)
    return F.binary_cross_entropy_with_logits(scores.float(), targets)


def hard_distillation_loss(loss: Tensor, scores: Tensor, teacher_scores: Tensor, teacher_share: float = 0.5) -> Tensor:
    """(1 - share) * loss + share * cross entropy with the teacher's most likely class: () float32.

    Hard distillation (Touvron et al., "Training data-efficient image transformers", ICML 2021, Eq. 3): the teacher's predicted class
    is a second label for the student. ConViT's Appendix B (Table 4) uses this form: its DeiT figures, 80.9 and 83.0, are those of hard
    distillation through the class token, so no student here needs a distillation token. Raises UserError: student and teacher
    have different numbers of classes.

    Args:
        loss: (), the student's loss against the labels, with Mixup and label smoothing as usual.
        scores: (B, classes), the student's logits, any floating type.
        teacher_scores: (B, classes), the teacher's logits for the same augmented images, in eval mode, without gradients.
    """
    if scores.shape != teacher_scores.shape:
        must = f"train.teacher must score the model's {scores.shape[-1]} classes for each of {len(scores)} images"
        problem = f"{must}, got {teacher_scores.shape[-1]} for {len(teacher_scores)}"
        raise UserError(problem, "choose a teacher that was trained on the same classes")
    decisions = teacher_scores.argmax(dim=-1)  # (B,)
    return (1 - teacher_share) * loss + teacher_share * F.cross_entropy(scores.float(), decisions)
