"""``train.micro_batch_size``."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline import checkpoint
from pipeline.config import Config
from pipeline.distributed.world import World


@dataclass(frozen=True)
class MicroBatch:
    size: int
    reason: str | None


def choose_micro_batch(config: Config, before: checkpoint.RunState | None, world: World) -> MicroBatch:
    return MicroBatch(config.train.micro_batch, None)


def with_micro_batch(config: Config, size: int) -> Config:
    """The config with ``train.micro_batch_size`` settled."""
    return config.model_copy(update={"train": config.train.model_copy(update={"micro_batch_size": size})})
