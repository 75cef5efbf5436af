"""Measure what frozen features are worth, with the settings of DINOv3's evaluations (Siméoni et al., 2025): nearest neighbours vote,
and logistic regression. Features are (n, D) float64 on any device, labels (n,) int64."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.cluster.world import World
from pipeline.config import Config
from pipeline.inference.evaluation import Forward, evaluation_loader
from pipeline.inference.prediction import RankRows
from pipeline.inference.prediction_table import features_dtype
from pipeline.stream.order import sample_at
from pipeline.stream.philox import Stream
from pipeline.stream.samples import Samples
from pipeline.terminal import Progress

NEIGHBOURS, TEMPERATURE = 20, 0.07  # DINO's
C_VALUES = tuple(10.0 ** np.linspace(-6, 5, 45))  # the inverse of the penalty's weight in the logistic regression
TRIES = 5  # of few images
_PRODUCTS = 1 << 26  # similarities, or scores of classes, at a time


@dataclass(frozen=True)
class Labelled:
    """Features with their labels."""

    features: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, numbers: np.ndarray) -> "Labelled":
        """Some rows, by their numbers."""
        rows = torch.from_numpy(numbers).to(self.labels.device)
        return Labelled(self.features[rows], self.labels[rows])

    def shuffled(self, epoch: int) -> np.ndarray:
        """The numbers of all rows, in another random order in each epoch."""
        return sample_at(np.arange(len(self)), epoch, len(self), 0, Stream.SUBSET)


@torch.no_grad()
def collect_features(
    forward: Forward, width: int, images: Samples, config: Config, world: World, beside: Path
) -> Labelled | None:
    """The features of all images that can be used, in their order, prepared as in an evaluation; None but on rank 0.
    Collective. ``forward``: images (B, 3, H, W) -> features (B, width); ``beside``: a path in a folder that all ranks see,
    which keeps hidden files meanwhile."""
    loader = evaluation_loader(images, config, world)
    merged: list[np.ndarray] = []
    with RankRows(beside, features_dtype(width), loader.batches, world) as rows:
        for _ in Progress(len(loader.batches), "computing features", "batches", world.is_main):
            batch = next(loader)
            features, numbers = forward(batch.images).float(), batch.request.index
            rows.add(index=numbers, valid=batch.valid, label=batch.labels, features=features)
        loader.close()
        rows.publish(lambda parts: merged.extend(part for part, _ in parts))
    if not world.is_main:
        return None
    table = np.concatenate(merged)
    columns = (torch.from_numpy(table[name].astype(dtype)) for name, dtype in (("features", np.float64), ("label", np.int64)))
    return Labelled(*(column.to(world.device) for column in columns))


def neighbours_vote(train: Labelled, features: Tensor, classes: int) -> Tensor:
    """The class (n,) that the nearest training images vote for: by cosine, with the weight exp(similarity / 0.07)."""
    bank = F.normalize(train.features, dim=1)
    predicted = []
    for part in F.normalize(features, dim=1).split(max(1, _PRODUCTS // len(bank))):
        similarity, nearest = (part @ bank.T).topk(min(NEIGHBOURS, len(bank)))  # (b, k)
        votes = part.new_zeros(len(part), classes).scatter_add_(1, train.labels[nearest], (similarity / TEMPERATURE).softmax(1))
        predicted.append(votes.argmax(1))
    return torch.cat(predicted)


def fit_logistic(train: Labelled, classes: int, c: float, begin: Tensor | None = None) -> Tensor:
    """Multinomial logistic regression with an L2 penalty, as scikit-learn's ``LogisticRegression(C=c)``, by L-BFGS. Returns
    (D + 1, classes): the weights, and in the last row, which has no penalty, the biases. ``begin`` are those to start from."""
    x, count, rows = F.pad(train.features, (0, 1), value=1.0), len(train), max(1, _PRODUCTS // classes)  # x: (n, D + 1)
    weights = (x.new_zeros(x.shape[1], classes) if begin is None else begin.clone()).requires_grad_()
    stop: dict[str, Any] = {"max_iter": 1000, "tolerance_grad": 1e-7, "tolerance_change": 1e-14}
    optimizer = torch.optim.LBFGS([weights], line_search_fn="strong_wolfe", **stop)

    def loss() -> Tensor:
        optimizer.zero_grad()
        total = weights[:-1].square().sum() / (2 * c * count)
        total.backward()
        for part, labels in zip(x.split(rows), train.labels.split(rows)):
            own = F.cross_entropy(part @ weights, labels, reduction="sum") / count
            own.backward()
            total = total.detach() + own.detach()
        return total

    optimizer.step(loss)
    return weights.detach()


def classify(weights: Tensor, features: Tensor) -> Tensor:
    """The best class (n,) by the weights of :func:`fit_logistic`."""
    return (features @ weights[:-1] + weights[-1]).argmax(1)


def choose_c(train: Labelled, classes: int, values: Sequence[float] = C_VALUES) -> float:
    """The C that is best on a random tenth of the training images, by a fit to the others."""
    order, weights, right = train.shuffled(0), None, []
    held, rest = train.part(order[: len(order) // 10]), train.part(order[len(order) // 10 :])
    for number in Progress(len(values), "choosing C", "values"):
        weights = fit_logistic(rest, classes, values[number], weights)
        right.append((classify(weights, held.features) == held.labels).sum().item())
    return values[int(np.argmax(right))]


def few_images(train: Labelled, per_class: int, attempt: int) -> Labelled:
    """A random choice of ``per_class`` training images of each class, all of a class that has fewer."""
    labels, order = train.labels.cpu().numpy(), train.shuffled(attempt)
    by_class = order[np.argsort(labels[order], kind="stable")]
    rank = np.arange(len(order)) - np.searchsorted(labels[by_class], labels[by_class])  # in its class
    return train.part(by_class[rank < per_class])


def accuracies(
    train: Labelled, val: Labelled, classes: int, few: Sequence[int], c: float | None
) -> tuple[dict[str, list[float]], float]:
    """Percent of ``val`` that is right, a number for each try, by ``k-NN``, ``linear`` and ``N a class``, a vote of few; and C, chosen if None."""
    c = c or choose_c(train, classes)
    predicted = {"k-NN": [neighbours_vote(train, val.features, classes)]}
    predicted["linear"] = [classify(fit_logistic(train, classes, c), val.features)]
    for n in few:
        some = (few_images(train, n, attempt) for attempt in range(TRIES))
        predicted[f"{n} a class"] = [neighbours_vote(each, val.features, classes) for each in some]
    return {name: [100 * (own == val.labels).double().mean().item() for own in tries] for name, tries in predicted.items()}, c
