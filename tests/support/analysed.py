"""The findings of a model's chapters, from images in memory."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pipeline.analysis.chapter import Chapter, Example, Findings, Request
from pipeline.analysis.measures import run_pass
from pipeline.analysis.style import style
from pipeline.cluster.world import World
from pipeline.models.common.base import VisionModel


class Alone(World):
    """The only process, without torch.distributed."""

    def sum(self, values: Tensor) -> Tensor:
        return values


@dataclass
class InMemory:
    """An evaluation's loader: batches of images, the last one padded with copies that must not count."""

    images: Tensor
    batch: int

    def __post_init__(self) -> None:
        self.batches = range(-(-len(self.images) // self.batch))
        self._next = 0

    def __next__(self) -> Any:
        places = torch.arange(self._next, self._next + self.batch)
        self._next += self.batch
        return SimpleNamespace(images=self.images[places.clamp(max=len(self.images) - 1)], valid=places < len(self.images))


def findings_of(
    chapter: type[Chapter],
    model: VisionModel,
    size: int,
    images: Tensor | None = None,
    batch: int = 2,
    query: tuple[int, int] | None = None,
) -> Findings:
    """What a chapter finds. Args: images: (B, 3, size, size) to average over, and to show the first of; None: without --data."""
    examples = [] if images is None else [Example("1", "one", images[0].sigmoid().float(), images[0])]
    of_model = chapter(Request(model.eval(), size, query, examples))
    collectors = of_model.collectors
    if images is not None and collectors:
        run_pass(model, InMemory(images, batch), Alone(0, 1, torch.device("cpu"), 1), collectors)  # type: ignore[arg-type]
    findings = Findings()
    of_model.add_findings(findings)
    return findings


def names(findings: Findings) -> set[str]:
    """Of all figures, made or not."""
    return {plot.name for plot in findings.plots} | set(findings.omitted)


def draw_all(findings: Findings) -> None:
    """Draw every figure, small. Raises: whatever drawing raises."""
    for plot in findings.plots:
        with style():
            plot.draw().savefig(BytesIO(), dpi=20)
