"""Hard distillation (Touvron et al., "Training data-efficient image transformers", ICML 2021, Eq. 3).

The teacher's predicted class is a second label for the student. ConViT's Appendix B (Table 4) uses this form: its DeiT figures,
80.9 and 83.0, are those of hard distillation through the class token, so no student here needs a distillation token.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.checkpoint.trained import read_trained
from pipeline.config import Config
from pipeline.errors import UserError
from pipeline.models.weights.transfer import first_difference
from pipeline.run.library_teacher import load_library_teacher
from pipeline.run.precision import autocast


def hard_distillation_loss(label_loss: Tensor, scores: Tensor, teacher_scores: Tensor, teacher_share: float = 0.5) -> Tensor:
    """(1 - share) * label loss + share * cross entropy with the teacher's most likely class.

    Args:
        label_loss: (), the student's loss against the labels, with Mixup and label smoothing as usual.
        scores: (B, classes), the student's logits, any floating type.
        teacher_scores: (B, classes), the teacher's logits for the same augmented images, in eval mode, without gradients.
        teacher_share: weight of the teacher's label; one half in DeiT.

    Returns:
        (), float32.

    Raises:
        UserError: student and teacher have different numbers of classes.
    """
    if scores.shape != teacher_scores.shape:
        raise UserError(
            f"the teacher gives {teacher_scores.shape[-1]} classes for each of {len(teacher_scores)} images, the model "
            f"{scores.shape[-1]} for {len(scores)}, equal numbers needed",
            "choose a teacher that was trained on the same classes",
        )
    decisions = teacher_scores.argmax(dim=-1)  # (B,)
    return (1 - teacher_share) * label_loss + teacher_share * F.cross_entropy(scores.float(), decisions)


def load_teacher(config: Config, device: torch.device, classes: list[str] | None = None) -> Callable[[Tensor], Tensor]:
    """Load the teacher: another run's model, with its averaged weights if it kept an average, or a network of another library.

    Args:
        config: of the student; ``train.teacher`` is the other run's folder, one of its checkpoints, an exported file, or a
            library and a name (:mod:`pipeline.run.library_teacher`).
        device: of the teacher.
        classes: the student's class names, in order; None: not compared. Libraries do not name theirs.

    Returns:
        images (B, 3, H, W) -> logits (B, classes), without gradients.

    Raises:
        UserError: there is no such model, or it has other classes or another image size.
    """
    teacher = load_library_teacher(config) if config.train.teacher_weights else _model_of_run(config, classes)
    teacher.to(device).requires_grad_(False)

    @torch.no_grad()
    def scores(images: Tensor) -> Tensor:
        with autocast(device, config.train.precision):
            return teacher(images)

    return scores


def _model_of_run(config: Config, classes: list[str] | None) -> nn.Module:
    assert config.train.teacher
    source = Path(config.train.teacher)
    trained = read_trained(source)
    for key in ("num_classes", "image_size"):
        found, needed = getattr(trained.config.model, key), getattr(config.model, key)
        if found != needed:
            raise UserError(f"train.teacher {source} has model.{key} {found}, {needed} needed", "choose another teacher")
    if classes and trained.named and (others := first_difference(trained.classes, classes)):
        raise UserError(f"train.teacher {source} knows {others}", "choose a teacher that was trained on the same classes")
    return trained.build_model()


def describe_teacher(config: Config) -> str:
    """The teacher in words, for the log."""
    train = config.train
    if not train.teacher_weights:
        return f"the model of {train.teacher}"
    return f"{train.teacher} with {train.teacher_weights}, which does not name its classes: they must be the data set's, in the same order"
