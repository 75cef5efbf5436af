"""Evaluate exactly: every image counts once, for any world size and batch size."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.cluster.world import World
from pipeline.config import Config
from pipeline.errors import UserError
from pipeline.loader.batches import EvalBatches
from pipeline.loader.loader import Batch, Loader
from pipeline.loader.probe import usable_decoding
from pipeline.logs.reduction import report_bad_samples
from pipeline.models.weights.transfer import first_difference
from pipeline.shards.image_folder import ImageFolder
from pipeline.shards.mixed_set import MixedSet
from pipeline.shards.shard_set import ShardSet
from pipeline.stream.samples import Samples
from pipeline.terminal import Progress

Forward = Callable[[Tensor], Tensor]  # images (B, 3, H, W) -> logits (B, classes), or features (B, width)
Consumer = Callable[[Batch, Tensor, Tensor, Tensor], None]


def evaluation_loader(shards: Samples, config: Config, world: World) -> Loader[EvalBatches]:
    """This rank's batches for :func:`evaluate`, pass after pass. Collective."""
    batches = EvalBatches(
        shards=shards,
        image_size=config.model.image_size,
        batch_size=config.eval.batch_size,
        rank=world.rank,
        world_size=world.size,
        eval_crop=config.data.eval_crop,
    )
    decode, form = usable_decoding(config.data.decode, shards, world)
    return Loader(batches, config.data, world.device, world.cpu_threads, decode=decode, form=form)


@torch.no_grad()
def evaluate(
    forward: Forward,
    loader: Loader[EvalBatches],
    world: World,
    stop: Callable[[], bool] | None = None,
    consumer: Consumer | None = None,
    truth: Tensor | None = None,
) -> dict[str, Any] | None:
    """Evaluate one pass over the set. Collective. Returns None if it was abandoned, else ``top1`` and ``top5`` in percent,
    ``loss`` (mean cross entropy), the integers ``correct1``, ``correct5`` and ``count``, and by class the lists of integers
    ``class_correct`` and ``class_count``. Images that cannot be used are logged and excluded from the count. If some logits are
    not finite, also ``nonfinite``, the number of these images, which count as wrong.

    Args:
        forward: images (B, 3, H, W) -> logits (B, classes).
        stop: called before every batch; returns True, on all ranks alike, to abandon the pass.
        consumer: gets each batch of this rank with its logits (B, classes) float32, the best classes (B, 5), and its losses (B,)
            float64. Padding and images that cannot be used are among them: ``batch.valid`` is False.
        truth: (images, classes) bool on the CPU: all classes that are right for an image, instead of its label alone.
    """
    totals = torch.zeros(5, dtype=torch.float64, device=world.device)  # correct1, correct5, loss, count, nonfinite
    by_class = torch.zeros(2, len(loader.batches.shards.classes), dtype=torch.float64, device=world.device)  # correct, count
    for _ in Progress(len(loader.batches), "evaluating", "batches", world.is_main):
        if stop and stop():
            return None
        batch = next(loader)
        scores = forward(batch.images).float()  # (B, classes)
        finite = scores.isfinite().all(dim=1)  # (B,)
        best = scores.topk(min(5, scores.shape[1]), dim=1).indices  # (B, 5)
        right = best == batch.labels[:, None]  # (B, 5)
        if truth is not None:
            right = truth[batch.request.index].to(best.device).gather(1, best)
        hits = right & (batch.valid & finite)[:, None]
        losses = F.cross_entropy(scores, batch.labels, reduction="none").double().where(batch.valid, 0)
        lost = batch.valid & ~finite
        totals += torch.stack([hits[:, 0].sum(), hits.any(1).sum(), losses.sum(), batch.valid.sum(), lost.sum()])
        by_class.index_add_(1, batch.labels, torch.stack([hits[:, 0], batch.valid]).double())
        if consumer:
            consumer(batch, scores, best, losses)
    report_bad_samples(world, loader.bad.take_unreported(), {})
    correct1, correct5, loss, count, nonfinite = world.sum(totals).tolist()
    class_correct, class_count = world.sum(by_class).long().tolist()
    return {
        "top1": 100 * correct1 / count,
        "top5": 100 * correct5 / count,
        "loss": loss / count,
        "correct1": int(correct1),
        "correct5": int(correct5),
        "count": int(count),
        "class_correct": class_correct,
        "class_count": class_count,
        **({"nonfinite": int(nonfinite)} if nonfinite else {}),
    }


def check_classes(config: Config, shards: ShardSet | MixedSet) -> None:
    """Check that the model has as many outputs as the shards have classes."""
    if config.model.num_classes != len(shards.classes):
        problem = f"model.num_classes is {config.model.num_classes}, but {shards.folder} has {len(shards.classes)} classes"
        raise UserError(problem, f"set model.num_classes={len(shards.classes)} or data.path to another shard set")


def check_same_classes(shards: ShardSet | ImageFolder, classes: list[str], of: str) -> None:
    """Check that the shards' classes, in index order, are those of ``of``, so that labels mean the same."""
    if others := first_difference(classes, shards.classes):
        raise UserError(f"{shards.folder} and {of} have {others}", "use shards of the same data set")
