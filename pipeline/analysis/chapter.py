"""Declare what each model family adds to an analysis: its figures, the averages that they need, and numbers for ``analysis.json``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeVar

from torch import Tensor

from pipeline.analysis.measures import Collector, plain
from pipeline.analysis.style import Figure
from pipeline.models.common.base import VisionModel

NO_IMAGES = "It needs images: pass --data."
_AnyCollector = TypeVar("_AnyCollector", bound=Collector)


@dataclass(frozen=True)
class Plot:
    """One figure, drawn only when it is written. A chapter's method leaves out what :func:`figure` declares."""

    caption: str  # what is seen and how to read it, with units; two or three sentences
    draw: Callable[[], Figure]
    title: str = ""  # one line above it on the page
    more_with_images: bool = False  # it is of the weights alone now, and images would add to it
    name: str = ""  # of its files and for --only: lower case with underscores, "nonlocality"
    source: str = ""  # the paper's figure that it repeats, "PerViT, Fig. 8"


@dataclass
class Findings:
    """The results of one analysis; chapters add to it."""

    measures: dict[str, Any] = field(default_factory=dict)  # JSON: name -> nested lists, nonlocality -> phi_p -> [layer][head]
    units: dict[str, str] = field(default_factory=dict)  # dotted name, "nonlocality.phi_p" -> "[layer][head], patches"
    plots: list[Plot] = field(default_factory=list)  # in the page's order
    omitted: dict[str, str] = field(default_factory=dict)  # name of a figure -> why this model has none, one sentence

    def measure(self, name: str, value: Any, unit: str, digits: int = 17) -> None:
        """Put numbers, :func:`~pipeline.analysis.measures.plain` with so many digits, under a dotted name. Args: unit: shape and unit."""
        *path, last = name.split(".")
        place = self.measures
        for part in path:
            place = place.setdefault(part, {})
        place[last] = plain(value, digits)
        self.units[name] = unit


@dataclass(frozen=True)
class Example:
    """An image that is shown with its attention maps."""

    key: str  # of the sample
    label: str  # name of its class
    pixels: Tensor  # (3, S, S) in [0, 1], on the CPU: as the model saw it, not normalized
    image: Tensor  # (3, S, S), normalized, on the model's device


@dataclass(frozen=True)
class Request:
    """What is asked of every chapter."""

    model: VisionModel  # in eval mode, on its device
    image_size: int  # side of the input in pixels
    query: tuple[int, int] | None = None  # (row, column) of the patch whose maps are shown; None: the centre
    examples: Sequence[Example] = ()  # empty without --data


@dataclass
class figure:
    """Decorator: declare the figure that a chapter's method makes. Figures are on the page in the order of their methods.

    The method gets the findings, to which it adds the figure's numbers. It returns a :class:`Plot`, or a list of them, whose figures
    are called ``name_1``, ``name_2``, ... It is called if the model does not lack the figure and what it needs is there.
    """

    name: str
    title: str
    source: str
    needs: Literal["weights", "images", "examples"] = "weights"
    make: Callable[[Any, Findings], Plot | list[Plot]] = field(init=False)

    def __call__(self, make: Callable[[Any, Findings], Plot | list[Plot]]) -> "figure":
        self.make = make
        return self


class Chapter:
    """One family's part. A subclass names the models it knows and declares figures.

    Its collectors see a pass over the images before :meth:`add_findings`. Without images there is no pass: their ``count`` is 0, and
    figures that need images go to ``omitted``.
    """

    models: ClassVar[tuple[type[VisionModel], ...]] = ()
    declared: ClassVar[list[figure]] = []

    def __init_subclass__(cls) -> None:
        cls.declared = [value for value in vars(cls).values() if isinstance(value, figure)]

    def __init__(self, request: Request) -> None:
        self.request, self.model = request, request.model
        self.collectors: list[Collector] = []

    @classmethod
    def applies(cls, model: VisionModel) -> bool:
        """Whether this chapter has anything to say of the model."""
        return isinstance(model, cls.models)

    def collect(self, collector: _AnyCollector) -> _AnyCollector:
        """Let a collector see the pass; returns it."""
        self.collectors.append(collector)
        return collector

    @property
    def count(self) -> int:
        """Images of the pass."""
        return max((collector.count for collector in self.collectors), default=0)

    def lacks(self, name: str) -> str | None:
        """Why the model has no figure of that name, whatever the images; None: it may have one. Empty: nothing is said of it."""
        return None

    def measure(self, findings: Findings) -> None:
        """Add numbers that belong to no figure, or to several, before all figures."""

    def add_findings(self, findings: Findings) -> None:
        """Add numbers, figures and what does not apply."""
        self.measure(findings)
        for declared in self.declared:
            there = {"weights": True, "images": self.count, "examples": self.request.examples}[declared.needs]
            reason = self.lacks(declared.name)
            if reason is None and not there:
                reason = "It shows examples: pass --examples." if declared.needs == "examples" and self.count else NO_IMAGES
            if reason:
                findings.omitted[declared.name] = reason
            if reason is not None:
                continue
            made = declared.make(self, findings)
            for number, plot in enumerate(made if isinstance(made, list) else [made], start=1):
                name = f"{declared.name}_{number}" if isinstance(made, list) else declared.name
                findings.plots.append(replace(plot, name=name, title=plot.title or declared.title, source=declared.source))
