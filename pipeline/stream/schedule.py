"""Compute the length of a run in steps and epochs, and when its evaluations are due."""

import math
from dataclasses import dataclass
from fractions import Fraction

from pipeline.config import Config
from pipeline.errors import UserError
from pipeline.stream.order import epoch_length


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

    @property
    def end(self) -> str:
        """What the last step is, for people."""
        return "train.max_steps" if self.last_step == self.max_steps else "the end of the schedule"

    def samples(self, step: int) -> int:
        return step * self.global_batch_size

    def epoch(self, step: int) -> float:
        return self.samples(step) / self.images

    def passes(self, step: int, every_epochs: float | None) -> bool:
        """Whether this step completes another ``every_epochs`` epochs, or the run."""
        return step == self.last_step or self._periods(step, every_epochs) > self._periods(step - 1, every_epochs)

    def evaluations(self, every_epochs: float | None) -> int:
        """How many steps of the run :meth:`passes` is true of."""
        before_last = self.last_step - 1
        return min(before_last, self._periods(before_last, every_epochs)) + 1  # a step may complete several periods

    def _periods(self, step: int, every_epochs: float | None) -> int:
        """How many times ``every_epochs`` epochs are complete after ``step``."""
        if every_epochs is None:
            return 0
        every_samples = Fraction(str(every_epochs)) * self.images  # exact: 0.3 // 0.1 is 2 in floating point
        return int(self.samples(step) // every_samples)


def make_schedule(config: Config, images: int, subset: float) -> Schedule:
    """The run's schedule. Raises UserError: it is shorter than one step.

    Args:
        images: that an epoch takes without repeated augmentation (:func:`~pipeline.stream.samples.images_per_epoch`).
        subset: share of the source's images that ``--subset`` kept; with ``train.scale_epochs``, training on it takes as many steps as
            on the full set.
    """
    train, images = config.train, epoch_length(images, config.augment.repeats)
    epochs = train.epochs / subset if train.scale_epochs else train.epochs
    schedule = Schedule(images, train.global_batch_size, epochs, train.max_steps, config.optim.cooldown_epochs)
    if schedule.last_step < 1:
        got = f"got {train.epochs:g} with {images} images an epoch and train.global_batch_size {train.global_batch_size}"
        raise UserError(f"train.epochs must give at least one optimizer step, {got}", "raise train.epochs")
    return schedule
