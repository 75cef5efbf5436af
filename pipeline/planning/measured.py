"""An earlier run whose figures stand in place of the model's."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipeline.config import Config
from pipeline.hardware import gpu_of_driver
from pipeline.planning.subject import Subject


@dataclass(frozen=True)
class Measured:
    """What a run has measured; ``pipeline.reports.pace`` reads it from a run folder.

    Attributes:
        source: the folder.
        config: of the run.
        world_size, nodes, stage: its processes, on how many hosts, and its ZeRO stage.
        device: as it calls itself.
        step_seconds: median of its optimizer steps, waiting for data included.
        steps: how many of them.
        data_wait: share of a step spent waiting for data.
        evaluation_seconds: median of its evaluations; None: none is recorded.
        start_seconds: median from a start to its first step; None: not recorded.
    """

    source: str
    config: Config
    world_size: int
    nodes: int
    stage: int
    device: str
    step_seconds: float
    steps: int
    data_wait: float
    evaluation_seconds: float | None = None
    start_seconds: float | None = None

    def subject(self, planned: Subject) -> Subject:
        """The run itself, on the planned kind of GPU."""
        return replace(planned, config=self.config, nodes=self.nodes, gpus_per_node=max(1, self.world_size // self.nodes))


def difference(measured: Measured, planned: Subject, precision: str) -> str | None:
    """Why the run's figures say nothing about the plan; None if they do. Another number of processes, batch sizes, ZeRO stage and
    activation checkpointing are no obstacle: the model of time knows them."""
    ours, theirs = planned.config, measured.config
    for name in ("name", "image_size", "num_classes", "switches"):
        if getattr(ours.model, name) != getattr(theirs.model, name):
            return f"its model.{name} is {getattr(theirs.model, name)}, not {getattr(ours.model, name)}"
    if theirs.train.precision not in ("auto", precision):
        return f"its train.precision is {theirs.train.precision}, not {precision}"
    known = gpu_of_driver(measured.device)
    on_gpu = any(maker in measured.device.lower() for maker in ("nvidia", "tesla", "geforce"))
    same = known is not None and known.chip == planned.gpu.chip if planned.gpu else not on_gpu
    if not same:
        return f"it ran on {measured.device}, and the plan is for {'CPUs' if planned.gpu is None else planned.gpu.name}"
    return None
