"""Compute which images a step takes and what is drawn for them: pure functions of (seed, place), independent of the processes.

The images of the run form one sequence: position p of epoch e is sample ``sample_at(p, e)``, the epochs follow each other
without a gap, and step s takes places s * G to (s + 1) * G - 1, where G is the global batch size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from examples.detection.config import DetectionConfig
from pipeline.stream.order import sample_at
from pipeline.stream.philox import Stream, random_words, uniforms


@dataclass(frozen=True)
class Request:
    """A micro-batch of B images."""

    epoch: np.ndarray  # (B,) int64
    position: np.ndarray  # (B,) int64, in the epoch
    sample: np.ndarray  # (B,) int64, index into the images to train on
    flip: np.ndarray  # (B,) bool
    torch_seed: np.ndarray  # (B,) int64: of the generator that draws the anchors and proposals which count


@dataclass(frozen=True)
class Schedule:
    """The steps of a run.

    Args:
        images: to train on.
        epochs: passes over them.
        batch: G, images per step.
        max_steps: a limit, or None.
    """

    images: int
    epochs: float
    batch: int
    max_steps: int | None

    @property
    def last_step(self) -> int:
        whole = max(1, int(np.ceil(self.epochs * self.images / self.batch)))
        return whole if self.max_steps is None else min(whole, self.max_steps)

    def epoch(self, step: int) -> float:
        """Epochs done after ``step`` steps."""
        return step * self.batch / self.images

    def evaluates(self, step: int, every_epochs: float | None) -> bool:
        """Whether an evaluation follows ``step``: it completes a multiple of ``every_epochs``, or is the last."""
        if step == self.last_step:
            return True
        if every_epochs is None or step == 0:
            return False
        return int(self.epoch(step) / every_epochs) > int(self.epoch(step - 1) / every_epochs)


def request(config: DetectionConfig, images: int, step: int, part: int, parts: int) -> Request:
    """A micro-batch.

    Args:
        config: of the run.
        images: to train on.
        step: optimizer steps before this one.
        part: which part of the step's images, 0 to ``parts`` - 1: accumulation * ranks + rank.
        parts: micro-batches of all ranks in one step.
    """
    size = config.train.global_batch_size // parts
    place = step * config.train.global_batch_size + part * size + np.arange(size)  # (B,)
    epoch, position = np.divmod(place, images)
    words = random_words(Stream.CROP_AND_FLIP, config.seed, epoch, position, 2)  # below 2**32
    return Request(
        epoch=epoch,
        position=position,
        sample=sample_at(position, epoch, images, config.seed),
        flip=words[:, 0] * 2.0**-32 < config.data.flip,
        torch_seed=words[:, 1].astype(np.int64),
    )


def noise(request: Request, seed: int, count: int) -> np.ndarray:
    """(B, count) float32 in [0, 1]: stochastic depth and dropout of the backbone."""
    return uniforms(Stream.STOCHASTIC_DEPTH, seed, request.epoch, request.position, count).astype(np.float32)


def learning_rate(step: int, schedule: Schedule, config: DetectionConfig) -> float:
    """Linear warm-up, then multi-step decay, both by the step, as mmdetection's 1x schedule.

    Args:
        step: optimizer steps before this one.
    """
    optim = config.optim
    decays = sum(schedule.epoch(step) >= epoch for epoch in optim.decay_epochs)
    rate = optim.lr * optim.decay_factor**decays
    if step >= optim.warmup_steps:
        return rate
    return rate * (optim.warmup_factor + (1 - optim.warmup_factor) * step / optim.warmup_steps)
