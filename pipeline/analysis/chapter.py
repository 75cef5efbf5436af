"""What each model family adds to an analysis: its collectors, and from their averages its findings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from pipeline.analysis.averages import Collector
from pipeline.analysis.findings import Findings
from pipeline.models.common.base import VisionModel


@dataclass(frozen=True)
class Example:
    """An image that is shown with its attention maps."""

    key: str  # of the sample
    label: str  # name of its class
    pixels: Tensor  # (3, S, S) in [0, 1], on the CPU: as the model saw it, not normalized
    image: Tensor  # (3, S, S), normalized, on the model's device


@dataclass(frozen=True)
class Request:
    """What is asked of every chapter.

    Attributes:
        model: in eval mode, on its device.
        image_size: side of the input in pixels.
        query: (row, column) of the patch whose maps are shown; None: the centre.
        examples: chosen images; empty without --data.
    """

    model: VisionModel
    image_size: int
    query: tuple[int, int] | None = None
    examples: Sequence[Example] = ()

    def query_on(self, grid: tuple[int, int]) -> tuple[int, int]:
        """(row, column) of the query on a grid of (rows, columns); its centre if none was asked for."""
        return self.query or (grid[0] // 2, grid[1] // 2)


class Chapter:
    """One family's part. A subclass takes the models it knows in :meth:`applies`.

    ``collectors`` is called before the pass over the images and ``findings`` after it. Without images there is no pass: the
    collectors' ``count`` is 0, and figures that need images go to ``omitted``.
    """

    def __init__(self, request: Request) -> None:
        self.request, self.model = request, request.model

    @classmethod
    def applies(cls, model: VisionModel) -> bool:
        """Whether this chapter has anything to say of the model."""
        raise NotImplementedError

    def collectors(self) -> list[Collector]:
        """Those whose averages the findings need."""
        return []

    def add_findings(self, findings: Findings) -> None:
        """Add numbers, figures and what does not apply."""
        raise NotImplementedError
