"""What an analysis gives: numbers for ``analysis.json``, figures, and what does not apply to this model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
