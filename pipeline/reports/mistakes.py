"""Show what the model confuses: accuracy per class, confusions, pictures of mistakes and of narrow hits."""

from collections.abc import Callable
from html import escape

import numpy as np

from pipeline.page import COLOURS, Figure, Html, figure, html, join, jpeg_uri, table
from pipeline.reports.curves import numbers, plot_title
from pipeline.reports.predictions import Predictions
from pipeline.shards.image_folder import open_split
from pipeline.stores.place import Place
from pipeline.stream.samples import DamagedSample

Namer = Callable[[int], str]  # class number -> name

_MATRIX = 25  # classes up to which the confusion matrix is drawn whole
_BARS = 15  # classes at each end that are drawn of more
_PAIRS = 15  # confusions listed
_PICTURES = 12  # of each kind
_LONGEST_NAME = 28  # characters of a class's name in a figure


class Pictures:
    """Reads images of a data set, a folder with shards or with images. ``classes``: names in index order, for a folder of images. Raises
    UserError: there is no data set."""

    def __init__(self, folder: Place, classes: list[str]) -> None:
        self._set = open_split(folder, "val", classes)
        self._places = {self._set.key(i): i for i in range(len(self._set))}

    @property
    def classes(self) -> list[str]:
        return list(self._set.class_names)

    def tag(self, key: str, label: int) -> Html | None:
        """The image of a key as an ``img`` element; None if it is not there, is of another label, or cannot be decoded."""
        index = self._places.get(key)
        if index is None or int(self._set.samples[np.array([index])]["label"][0]) != label:
            return None  # another data set: a wrong picture would be worse than none
        try:
            return html('<img alt="{}" src="{}">', key, jpeg_uri(self._set.read(index).tobytes()))
        except (DamagedSample, OSError, ValueError):
            return None


def mistakes(found: Predictions, classes: list[str], pictures: Pictures | None, no_pictures: str) -> Html:
    """Show everything that per-image results tell. ``classes``: names in index order; may be empty. ``pictures``: of the same images; None
    where there are none, and ``no_pictures`` says why."""

    def name(number: int) -> str:
        return classes[number] if 0 <= number < len(classes) else f"class {number}"

    right, count = int(found.right.sum()), len(found.files)
    told = "<p>{} of {} images right, {} % top-1 (<code>{}</code>).</p>"
    head = html(told, f"{right:,}", f"{count:,}", f"{100 * right / count:.2f}", found.path.name)
    missing = html('<p class="quiet">{}</p>', no_pictures) if pictures is None else Html("")
    return join([head, _per_class(found, name), _confusions(found, name), missing, _shown(found, name, pictures)])


def _short(text: str) -> str:
    cut = text if len(text) <= _LONGEST_NAME else text[: _LONGEST_NAME - 1] + "…"
    return escape(cut)  # plotly reads tags in its texts


def _per_class(found: Predictions, name: Namer) -> Html:
    ranked = sorted(found.by_class(), key=lambda row: (row[2] / row[1], row[0]))
    parts = {"Accuracy by class": ranked}
    if len(ranked) > 2 * _BARS:
        parts = {"Lowest accuracy": ranked[:_BARS], "Highest accuracy": ranked[-_BARS:]}
    drawn = [figure(_bars(part, title, name)) for title, part in parts.items()]
    cells = [
        (name(label), f"{images:,}", f"{100 * hits / images:.2f}", f"{100 * among / images:.2f}")
        for label, images, hits, among in ranked
    ]
    whole = table(("class", "images", "top-1 %", "top-5 %"), cells, numeric=(1, 2, 3), sortable=True)
    shown = '<div class="plots">{}</div><details><summary class="quiet">All {} classes as a table</summary>{}</details>'
    return html(shown, drawn, len(ranked), whole)


def _bars(rows: list[tuple[int, int, int, int]], title: str, name: Namer) -> Figure:
    values = np.array([100 * hits / images for _, images, hits, _ in rows])
    names, places = [_short(name(row[0])) for row in rows], list(range(len(rows)))
    texts = [f"{label}: {hits:,} of {images:,} right" for label, (_, images, hits, _) in zip(names, rows)]
    trace = {
        "type": "bar", "orientation": "h", "x": numbers(values), "y": places, "text": [f"{value:.1f}" for value in values],
        "textposition": "auto", "hovertext": texts, "hoverinfo": "text", "marker": {"color": COLOURS[0]}, "insidetextfont": {"color": "#fff"},
        "cliponaxis": False,
    }  # fmt: skip
    layout = {
        "title": plot_title(f"{title} (top-1, %)"), "showlegend": False, "hovermode": "closest",
        "xaxis": {"range": [0, 106], "tickvals": [0, 25, 50, 75, 100]},
        "yaxis": {"tickvals": places, "ticktext": names, "autorange": "reversed", "automargin": True},
    }  # fmt: skip
    return Figure([trace], layout, 70 + 22 * len(rows), title)


def _confusions(found: Predictions, name: Namer) -> Html:
    pairs = found.confusions()
    if not pairs:
        return html("<p>No image is confused.</p>")
    cells = [(name(label), name(taken), f"{images:,}", f"{100 * share:.1f}") for label, taken, images, share in pairs[:_PAIRS]]
    listed = table(("class", "taken for", "images", "% of the class"), cells, numeric=(2, 3), sortable=True)
    classes = np.union1d(found.label, found.top1)
    drawn = [figure(_matrix(found, classes, name))] if len(classes) <= _MATRIX else []
    shown = f"The {len(cells)} most frequent of {len(pairs):,} confusions" if len(pairs) > len(cells) else "Confusions"
    return html('<div class="plots"><div><h3>{}</h3>{}</div>{}</div>', shown, listed, drawn)


def _matrix(found: Predictions, classes: np.ndarray, name: Namer) -> Figure:
    counts = np.zeros((len(classes), len(classes)))
    np.add.at(counts, (np.searchsorted(classes, found.label), np.searchsorted(classes, found.top1)), 1)
    wrong = np.where(np.eye(len(classes)), np.nan, counts)
    names = [_short(name(int(label))) for label in classes]

    def text(i: int, j: int) -> str:
        return f"{names[i]}, taken for {names[j]}: {int(counts[i, j])}" if i != j else f"{names[i]}: {int(counts[i, i])} right"

    places = list(range(len(names)))
    trace = {
        "type": "heatmap", "z": [numbers(row) for row in wrong], "text": [[text(i, j) for j in places] for i in places], "hoverinfo": "text",
        "xgap": 1, "ygap": 1, "colorscale": [[0, "rgba(128,128,128,0.10)"], [1, COLOURS[1]]], "zmin": 0,
        "colorbar": {"thickness": 10, "outlinewidth": 0},
    }  # fmt: skip
    ticks = {"tickvals": places, "ticktext": names, "automargin": True, "showgrid": False}
    layout = {
        "title": plot_title("Mistakes: class (rows), predicted (columns)"), "hovermode": "closest",
        "xaxis": ticks,
        "yaxis": {**ticks, "autorange": "reversed"},
    }  # fmt: skip
    return Figure([trace], layout, max(340, 120 + 24 * len(names)), "Confusion matrix")


def _shown(found: Predictions, name: Namer, pictures: Pictures | None) -> Html:
    """Captioned pictures; a table with the same where there are no pictures."""
    parts = []
    for title, right in (("The most confident mistakes", False), ("The least certain hits", True)):
        images = found.ranked(right, _PICTURES)
        tags = [pictures.tag(found.files[i], int(found.label[i])) if pictures else None for i in images]
        if any(tags):
            body = [_captioned(found, i, name, tag) for i, tag in zip(images, tags)]
            parts.append(html('<h3>{}</h3><div class="pictures">{}</div>', title, body))
        elif images:
            cells = [
                (found.files[i], name(found.label[i]), name(found.top1[i]), f"{100 * found.certainty[i]:.1f}") for i in images
            ]
            listed = table(("image", "class", "predicted", "probability %"), cells, numeric=(3,))
            parts.append(html("<h3>{}</h3>{}", title, listed))
    return join(parts)


def _captioned(found: Predictions, i: int, name: Namer, tag: Html | None) -> Html:
    label, predicted, certainty = int(found.label[i]), int(found.top1[i]), f"{100 * found.certainty[i]:.1f} %"
    if label != predicted:
        own = f"{100 * found.label_probability[i]:.1f}"
        told = "<b>{}</b><br>predicted: {} {}<br>its own class: {} %"
        words = html(told, name(label), name(predicted), certainty, own)
    else:
        several = found.top5.shape[1] > 1
        second = f", then {name(int(found.top5[i, 1]))} {100 * found.probabilities[i, 1]:.1f} %" if several else ""
        words = html("<b>{}</b> {}{}", name(label), certainty, second)
    return html("<figure>{}<figcaption>{}</figcaption></figure>", tag or html("<p>no picture</p>"), words)
