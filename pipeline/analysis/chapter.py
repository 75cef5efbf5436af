"""Declare what each model family adds to an analysis: its figures, the averages that they need, and numbers for ``analysis.json``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

from pipeline.analysis.measures import Collector
from pipeline.models.common.base import VisionModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NO_IMAGES = "It needs images: pass --data."
NO_EXAMPLES = "It shows examples: pass --examples."


@dataclass(frozen=True)
class Plot:
    """One figure, drawn only when it is written.

    Attributes:
        name: of its files and for ``--only``: lower case with underscores, ``nonlocality``.
        title: one line above it on the page.
        caption: what is seen and how to read it, with units; two or three sentences.
        source: the paper's figure that it repeats, "PerViT, Fig. 8".
        draw: returns the matplotlib figure.
        more_with_images: whether it is of the weights alone now, and images would add to it.
    """

    name: str
    title: str
    caption: str
    source: str
    draw: Callable[[], Figure]
    more_with_images: bool = False


@dataclass
class Findings:
    """The results of one analysis; chapters add to it.

    Attributes:
        measures: name -> nested lists or numbers, as ``nonlocality -> phi_p -> [layer][head]``. JSON as it is.
        units: the same names, dotted (``nonlocality.phi_p``) -> shape and unit, "[layer][head], patches".
        plots: in the page's order.
        omitted: name of a figure -> why this model has none, one sentence.
    """

    measures: dict[str, Any] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)
    plots: list[Plot] = field(default_factory=list)
    omitted: dict[str, str] = field(default_factory=dict)

    def measure(self, name: str, value: Any, unit: str) -> None:
        """Put a number or array under a dotted name. Args: value: a tensor or plain data; unit: shape and unit."""
        *path, last = name.split(".")
        place = self.measures
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value.tolist() if hasattr(value, "tolist") else value
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


@dataclass(frozen=True)
class Drawn:
    """A figure as its method gives it: the caption, and what draws it; the rest is declared. ``title`` replaces the declared one."""

    caption: str
    draw: Callable[[], Figure]
    title: str = ""
    more_with_images: bool = False


@dataclass(frozen=True)
class Declared:
    """A figure of a chapter, see :func:`figure`."""

    name: str
    title: str
    source: str
    needs: Literal["weights", "images", "examples"]
    make: Callable[[Any, Findings], Drawn | list[Drawn]]


def figure(name: str, title: str, source: str, needs: Literal["weights", "images", "examples"] = "weights") -> Callable:
    """Decorator: declare the figure that a chapter's method makes. Figures are on the page in the order of their methods.

    The method gets the findings, to which it adds the figure's numbers. It returns a :class:`Drawn`, or a list of them, whose figures are
    called ``name_1``, ``name_2``, ... It is called if the model does not lack the figure and ``needs`` are there.
    """
    return lambda make: Declared(name, title, source, needs, make)


class Chapter:
    """One family's part. A subclass takes the models it knows in :meth:`applies`, and declares figures.

    ``collectors`` is called before the pass over the images and ``add_findings`` after it. Without images there is no pass: the
    collectors' ``count`` is 0, and figures that need images go to ``omitted``.

    Attributes:
        count: images of the pass.
    """

    declared: ClassVar[list[Declared]] = []

    def __init_subclass__(cls) -> None:
        cls.declared = [value for value in vars(cls).values() if isinstance(value, Declared)]

    def __init__(self, request: Request) -> None:
        self.request, self.model = request, request.model
        self._collectors: list[Collector] = []

    @classmethod
    def applies(cls, model: VisionModel) -> bool:
        """Whether this chapter has anything to say of the model."""
        raise NotImplementedError

    def make_collectors(self) -> list[Collector]:
        """Those whose averages the figures need."""
        return []

    def collectors(self) -> list[Collector]:
        """Those of :meth:`make_collectors`, made once."""
        self._collectors = self._collectors or self.make_collectors()
        return self._collectors

    @property
    def count(self) -> int:
        return max((collector.count for collector in self._collectors), default=0)

    @classmethod
    def figures_of(cls, model: VisionModel) -> list[Declared]:
        """The figures that such a model has or lacks for a reason; the others are not named."""
        return cls.declared

    def lacks(self, name: str) -> str | None:
        """Why the model has no figure of that name, whatever the images; None: it may have one."""
        return None

    def measure(self, findings: Findings) -> None:
        """Add numbers that belong to no figure, or to several, before all figures."""

    def add_findings(self, findings: Findings) -> None:
        """Add numbers, figures and what does not apply."""
        self.measure(findings)
        for declared in self.figures_of(self.model):
            if reason := self.lacks(declared.name) or self._missing(declared):
                findings.omitted[declared.name] = reason
                continue
            made = declared.make(self, findings)
            for number, drawn in enumerate(made if isinstance(made, list) else [made], start=1):
                name = f"{declared.name}_{number}" if isinstance(made, list) else declared.name
                title = drawn.title or declared.title
                findings.plots.append(Plot(name, title, drawn.caption, declared.source, drawn.draw, drawn.more_with_images))

    def _missing(self, declared: Declared) -> str | None:
        if declared.needs == "examples" and not self.request.examples:
            return NO_EXAMPLES if self.count else NO_IMAGES
        return NO_IMAGES if declared.needs == "images" and not self.count else None
