"""What is planned: a config on a number of nodes with GPUs of a kind."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config import Config
from pipeline.hardware import Gpu


@dataclass(frozen=True)
class Subject:
    """A run that may be submitted.

    Attributes:
        config: the run; ``train.micro_batch_size`` is a number.
        nodes, gpus_per_node: one process for each GPU.
        gpu: the kind of all GPUs; None: processes on CPUs, whose memory is that of PyTorch's allocator.
    """

    config: Config
    nodes: int
    gpus_per_node: int
    gpu: Gpu | None

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node
