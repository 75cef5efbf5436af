"""Build a page: one HTML file with its style, its scripts and its pictures inside, which opens without a network; and its colours.

Whatever comes from a file (names of classes, keys, messages) goes through :func:`html`, which escapes it.
"""

import base64
import io
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from pipeline.lazy import import_library

BLUE, ORANGE, GREEN, PINK, PURPLE, GREY, SKY, RED = COLOURS = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#8A6FD1", "#6E6E6E", "#56B4E9", "#D55E00",
)  # fmt: skip
"""Colours of categories, in this order, which can be told apart without red and green (Okabe and Ito), on light and dark."""


def shade(depth: float) -> str:
    """A colour from orange (0, the first layer) to blue (1, the last), legible on light and dark."""
    ends = zip((232, 150, 62), (58, 92, 190))
    return "#{:02x}{:02x}{:02x}".format(*(round(first + depth * (last - first)) for first, last in ends))


class Html(str):
    """Text that is HTML already: it is not escaped again."""


def html(pattern: str, *values: object, **named: object) -> Html:
    """A piece of HTML: ``pattern.format(...)`` with lists and tuples joined and every value escaped that is not :class:`Html` itself."""
    return Html(pattern.format(*map(_piece, values), **{name: _piece(value) for name, value in named.items()}))


def join(pieces: Iterable[object], between: str = "") -> Html:
    """Pieces after each other, each of them escaped unless it is HTML."""
    return Html(between.join(_piece(piece) for piece in pieces))


def _piece(value: object) -> str:
    if isinstance(value, Html):
        return value
    return join(value) if isinstance(value, list | tuple) else escape(str(value))


@dataclass(frozen=True)
class Section:
    """A part of a page."""

    title: str  # its heading, and its entry in the list of contents
    body: Html
    closed: bool = False  # it is folded up when the page opens; it is printed all the same
    name: str = ""  # its anchor; empty: by its number


@dataclass(frozen=True)
class Figure:
    """A plotly figure."""

    traces: list[dict[str, Any]]  # plotly's ``data``, plain values
    layout: dict[str, Any] = field(default_factory=dict)  # plotly's ``layout``, beyond what all figures of a page have
    height: int = 320  # pixels
    label: str = ""  # what it shows, for those who cannot see it


def figure(shown: Figure) -> Html:
    """The place of a figure, with its data; the page's script draws it."""
    data = json.dumps({"data": shown.traces, "layout": shown.layout}, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":  # nothing in the data can end its element
        data = data.replace(character, f"\\u{ord(character):04x}")
    place = '<div class="plot" style="height:{}px" role="img" aria-label="{}"><script type="application/json">{}</script></div>'
    return html(place, shown.height, shown.label, Html(data))


def table(
    head: Sequence[object], rows: Iterable[Sequence[object]], numeric: Sequence[int] = (), sortable: bool = False, css: str = ""
) -> Html:
    """A table that scrolls sideways where it is wider than the page; without a head where that is empty. Columns that are ``numeric``
    are set flush right; of a ``sortable`` one, a click on a title sorts by it."""

    def cells(tag: str, row: Sequence[object]) -> list[Html]:
        return [html("<{0}{1}>{2}</{0}>", tag, Html(' class="n"') if i in numeric else "", cell) for i, cell in enumerate(row)]

    titles = html("<thead><tr>{}</tr></thead>", cells("th", head)) if head else ""
    body = [html("<tr>{}</tr>", cells("td", row)) for row in rows]
    kind = f"{css} sortable" if sortable else css
    return html('<div class="wide"><table class="{}">{}<tbody>{}</tbody></table></div>', kind, titles, body)


def facts(pairs: Iterable[tuple[object, object]]) -> Html:
    """Names and values, one pair per line."""
    return html('<dl class="facts">{}</dl>', [html("<dt>{}</dt><dd>{}</dd>", name, value) for name, value in pairs])


def page(title: str, subtitle: object, sections: Sequence[Section], notes: Sequence[object] = (), plots: bool = True) -> str:
    """A whole page. ``notes``: what the reader must know first, above all sections: what is missing or damaged. ``plots``: there are
    figures, which need plotly's script. Raises UserError: plotly is not installed."""
    names = [section.name or f"s{number}" for number, section in enumerate(sections)]
    contents = [html('<a href="#{}">{}</a>', name, section.title) for name, section in zip(names, sections)]
    details = '<details class="section" id="{}"{}><summary><h2>{}</h2></summary>{}</details>'
    body = [html(details, name, "" if one.closed else " open", one.title, one.body) for name, one in zip(names, sections)]
    listed = html('<ul class="notes">{}</ul>', [html("<li>{}</li>", note) for note in notes]) if notes else ""
    scripts = [_resource("page.js")]
    if plots:
        plotly = import_library("plotly.offline", "a report", "plotly", "insight")
        scripts.insert(0, plotly.get_plotlyjs())  # 4.8 MB: the Python package has no smaller build
    return html(
        _resource("page.html"),
        title=title,
        subtitle=subtitle,
        style=Html(_resource("page.css")),
        contents=contents,
        notes=listed,
        sections=body,
        made=time.strftime("%Y-%m-%d %H:%M"),
        scripts=[html("<script>{}</script>", Html(script)) for script in scripts],
    )


def jpeg_uri(encoded: bytes, side: int = 160) -> str:
    """An image as the address of itself, its longer side at most ``side`` pixels. Raises OSError, ValueError: not decodable."""
    from PIL import Image

    with Image.open(io.BytesIO(encoded)) as image:
        small = image.convert("RGB")
    small.thumbnail((side, side))
    return _uri(small, "jpeg", quality=82)


def png_uri(path: Path, longest: int = 1400) -> str:
    """A PNG file as the address of itself, made smaller where a side is longer than ``longest`` pixels. Raises OSError,
    ValueError: it cannot be decoded."""
    from PIL import Image

    with Image.open(path) as image:
        image.load()
        shown = image if image.mode in ("RGB", "RGBA", "L", "P") else image.convert("RGB")
    if max(shown.size) > longest:
        shown = shown.convert("RGB")
        shown.thumbnail((longest, longest))
    return _uri(shown, "png", optimize=True)


def _uri(image: Any, form: str, **options: Any) -> str:
    file = io.BytesIO()
    image.save(file, form, **options)
    return f"data:image/{form};base64,{base64.b64encode(file.getvalue()).decode()}"


def clock(moment: float | None) -> str:
    """A time of day with its date, where this runs."""
    try:
        return "?" if moment is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
    except (OverflowError, ValueError, OSError):
        return "?"


def _resource(name: str) -> str:
    return files("pipeline.page").joinpath(name).read_text(encoding="utf-8")
