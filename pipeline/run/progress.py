"""The schedule of a run: its length in steps and epochs, and when evaluations are due."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from pipeline.config import Config
from pipeline.data.mixed_set import MixedSet
from pipeline.data.samples import images_per_epoch
from pipeline.data.shards import ShardSet
from pipeline.data.views import epoch_length
from pipeline.errors import UserError


@dataclass(frozen=True)
class Schedule:
    """Conversions between steps, samples and epochs. Epochs follow each other without a gap, so a step may span two."""

    images: int  # per epoch
    global_batch_size: int
    epochs: float  # of the learning rate's cosine
    max_steps: int | None
    cooldown_epochs: float = 0.0  # after the cosine

    @property
    def steps_per_epoch(self) -> float:
        return self.images / self.global_batch_size

    @property
    def last_step(self) -> int:
        """The end of the schedule, or ``max_steps`` if that comes first."""
        steps = (self.epochs + self.cooldown_epochs) * self.steps_per_epoch
        whole = math.ceil(steps - 1e-9)  # 1e-9: a rounding error must not add a step
        return whole if self.max_steps is None else min(whole, self.max_steps)

    def samples(self, step: int) -> int:
        return step * self.global_batch_size

    def epoch(self, step: int) -> float:
        return self.samples(step) / self.images

    def passes(self, step: int, every_epochs: float | None) -> bool:
        """Whether this step completes another ``every_epochs`` epochs, or the run."""
        if step == self.last_step:
            return True
        if every_epochs is None:
            return False
        every_samples = Fraction(str(every_epochs)) * self.images  # exact: 0.3 // 0.1 is 2 in floating point
        return self.samples(step) // every_samples > self.samples(step - 1) // every_samples


def make_schedule(config: Config, train_set: ShardSet | MixedSet) -> Schedule:
    """The run's schedule; with ``train.scale_epochs``, training on a subset takes as many steps as on the full set.

    Raises:
        UserError: it is shorter than one step.
    """
    images = epoch_length(images_per_epoch(train_set), config.augment.repeats)
    epochs = config.train.epochs
    if config.train.scale_epochs:
        epochs /= train_set.subset
    schedule = Schedule(images, config.train.global_batch_size, epochs, config.train.max_steps, config.optim.cooldown_epochs)
    if schedule.last_step < 1:
        raise UserError(
            f"train.epochs is {config.train.epochs:g}, which with {images} images an epoch and train.global_batch_size "
            f"{config.train.global_batch_size} is not one optimizer step, at least one needed",
            "raise train.epochs",
        )
    return schedule
