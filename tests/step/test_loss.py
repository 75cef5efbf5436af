"""The training losses against their definitions, and the configs that name none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.config import TrainConfig, load_config
from pipeline.errors import UserError
from pipeline.step.loss import Objective, cross_entropy, label_loss
from pipeline.step.train_step import forward_backward

CLASSES = 7


def mixed_batch() -> SimpleNamespace:
    """Mixtures, an image that is wholly its own, one that is wholly the other, and one mixed with another of its class."""
    return SimpleNamespace(
        labels=torch.tensor([0, 1, 2, 3]),
        other_labels=torch.tensor([4, 5, 6, 3]),
        weight=torch.tensor([0.3, 1.0, 0.0, 0.6]),
    )


def targets(batch: SimpleNamespace, smoothing: float) -> Tensor:
    rows = torch.zeros(4, CLASSES, dtype=torch.float64)
    for row, own, other, weight in zip(rows, batch.labels, batch.other_labels, batch.weight.double()):
        row[own] += weight * (1 - smoothing)
        row[other] += (1 - weight) * (1 - smoothing)
        row += smoothing / CLASSES
    return rows


@pytest.mark.parametrize(("threshold", "smoothing"), [(0.0, 0.0), (None, 0.0), (None, 0.1), (0.2, 0.1), (0.35, 0.0)])
def test_binary_cross_entropy_is_its_definition(threshold: float | None, smoothing: float) -> None:
    """Guards against a sum instead of the mean, targets on the wrong side of the threshold, and smoothing that is left out."""
    batch, scores = mixed_batch(), torch.randn(4, CLASSES, generator=torch.Generator().manual_seed(0), requires_grad=True)
    train = TrainConfig(loss="bce", bce_threshold=threshold, label_smoothing=smoothing)
    loss = Objective(label_loss(train))(scores, batch)
    loss.backward()
    wanted = targets(batch, smoothing)
    if threshold is not None:
        wanted = (wanted > threshold).double()
    exact = scores.detach().double().requires_grad_()
    expected = -(wanted * F.logsigmoid(exact) + (1 - wanted) * F.logsigmoid(-exact)).mean()
    expected.backward()
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(scores.grad.double(), exact.grad, rtol=1e-5, atol=1e-8)


def test_in_deit_iii_both_labels_of_a_mixture_count_fully() -> None:
    """Guards against a label of weight 0 that counts, and against the mixture's shares as targets."""
    batch, scores = mixed_batch(), torch.zeros(4, CLASSES, requires_grad=True)
    Objective(label_loss(TrainConfig(loss="bce", label_smoothing=0)))(scores, batch).backward()
    present = scores.grad < 0
    assert [row.nonzero().flatten().tolist() for row in present] == [[0, 4], [1], [6], [3]]


def test_cross_entropy_is_what_it_was() -> None:
    """Guards against another loss for configs that do not name one, to the last bit."""
    batch, scores = mixed_batch(), torch.randn(4, CLASSES)
    expected = cross_entropy(scores, batch.labels, batch.other_labels, batch.weight, 0.1)
    assert torch.equal(Objective(label_loss(TrainConfig()))(scores, batch), expected)


REFUSED = {
    "train.loss=bce train.label_smoothing=0 train.teacher=runs/teacher": "train.loss must be cross_entropy with train.teacher=runs/teacher, got bce, for which hard distillation",
    "train.loss=bce": "override 'train.loss=bce': train.loss=bce requires targets of at most train.bce_threshold 0 for classes that are not shown, got 0.0001 for 1000",
    "train.loss=bce train.bce_threshold=0.95": "requires a train.bce_threshold below the target of a class that is shown, 0.9 with train.label_smoothing 0.1, got 0.95",
    "train.loss=focal": "train.loss must be 'cross_entropy' or 'bce', got 'focal'.",
    "augment.three_augment=true augment.rand_augment_ops=2": "augment.three_augment requires augment.rand_augment_ops=0, got 2 with augment.three_augment=true",
    "augment.color_jitter=0.3 augment.rand_augment_ops=2": "augment.color_jitter requires augment.rand_augment_ops=0, got 2 with augment.color_jitter=0.3",
    "augment.color_jitter=1.5": "augment.color_jitter must be at most 1, got 1.5.",
    "data.train_crop=simple data.crop_scale=[0.2,1]": "data.crop_scale must be left at its default [0.08, 1.0] with data.train_crop=simple, got [0.2, 1.0]",
    "data.train_crop=simple model.image_size=4": "model.image_size must be at least 5 with data.train_crop=simple, which mirrors 4 pixels at each border, got 4",
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_what_does_not_fit_together_is_refused_in_one_sentence(overrides: str, tmp_path: Path) -> None:
    """Guards against a traceback, a key that is silently ignored, and a loss for which every class is in every image."""
    config = tmp_path / "config.yaml"
    config.write_text("seed: 1\n")
    with pytest.raises(UserError) as refused:
        load_config(config, overrides.split())
    assert REFUSED[overrides] in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("offset", [torch.inf, -torch.inf, torch.nan])
def test_a_loss_that_is_not_finite_has_no_finite_gradient(offset: float) -> None:
    """Guards against a step that is taken because the gradient of a loss that is not finite happens to be."""
    weight = torch.ones(3, requires_grad=True)
    batch = SimpleNamespace(images=torch.ones(3))
    objective = lambda scores, _: scores.sum() + offset  # noqa: E731
    loss = forward_backward(lambda images, _: weight * images, Tensor.backward, batch, None, objective)  # type: ignore[arg-type]
    assert not loss.isfinite() and weight.grad is not None and weight.grad.isnan().all()
