"""Memory per GPU of a planned run, by part, and the largest micro-batch that fits."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.planning.subject import Subject


@dataclass(frozen=True)
class Memory:
    """What one process of a run holds at the moment when it holds most.

    Attributes:
        parts: bytes by name, in the order of the page.
        capacity: bytes of the GPU that a process can allocate; for processes on CPUs this machine's memory, shared out.
        micro_batch, accumulation: images per forward pass and GPU, and forward passes per optimizer step.
        stage: of ZeRO, 0 on one process.
    """

    parts: dict[str, int]
    capacity: int
    micro_batch: int
    accumulation: int
    stage: int

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity

    @property
    def left(self) -> int:
        """Bytes that remain; negative where it does not fit."""
        return self.capacity - self.total


def plan_memory(subject: Subject, micro_batch: int | None = None) -> Memory:
    """Plan the memory of one process.

    Args:
        subject: the run; its precision "auto" is what its GPU computes natively.
        micro_batch: in place of ``train.micro_batch_size``.

    Raises:
        UserError: the batch sizes do not divide, or the model cannot be built.
    """
    raise NotImplementedError


def largest_micro_batch(subject: Subject) -> int:
    """The largest micro-batch size that fits: one that the run may have, so that it is a multiple of ``config.augment.unit`` and a
    whole number of micro-batches makes a global batch. 0: none fits.

    Raises:
        UserError: no micro-batch size divides the global batch on this number of processes.
    """
    raise NotImplementedError
