"""An earlier run whose figures stand in place of the model's."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from pipeline.config import Config
from pipeline.planning.gpus import GPUS
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
    kind = gpu_kind(measured.device)
    wanted = planned.gpu.name.partition("-")[0] if planned.gpu else None
    if kind != wanted:
        return f"it ran on {measured.device}, and the plan is for {'CPUs' if planned.gpu is None else planned.gpu.name}"
    return None


def gpu_kind(device: str) -> str | None:
    """The first part of a kind's name in ``gpus``, such as "h100", from what the driver calls it; None: a CPU.

    A GPU that ``gpus`` does not know stays what the driver calls it.
    """
    if not re.search(r"nvidia|tesla|geforce", device, re.IGNORECASE):
        return None
    words = re.sub(r"[^a-z0-9]+", " ", device.lower())
    for name in GPUS:
        kind = name.partition("-")[0]
        if re.search(rf"\b{kind.replace('rtx', 'rtx ?')}\b", words):
            return kind
    return device
