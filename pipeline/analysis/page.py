"""Show an analysis as a page: one HTML file with its figures inside, in the frame that reports have too."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

from pipeline.page import Html, Section, facts, html, join, page, table


@dataclass(frozen=True)
class Picture:
    """A figure as it is on the page. ``entry``: of ``analysis.json``; ``png``: its bytes; ``width``: in CSS pixels."""

    entry: dict[str, Any]
    png: bytes
    width: int


def analysis_page(result: dict[str, Any], pictures: list[Picture]) -> str:
    """The page. Args: result: what is in ``analysis.json``; pictures: in its order."""
    sections = [Section("What was analyzed", facts(_facts(result).items()), name="analyzed")]
    sections += [Section(picture.entry["title"], _figure(picture), name=picture.entry["name"]) for picture in pictures]
    if result["omitted"]:
        omitted = table((), result["omitted"].items())
        sections.append(Section("Figures that this analysis does not have", omitted, name="omitted"))
    numbers = html(
        'Every number behind the figures, with its unit, is in <a href="analysis.json">analysis.json</a>. Layers and heads are counted '
        "from 1 in the figures and from 0 in the file."
    )
    return page(f"Inside {result['model']}", numbers, sections, plots=False)


def _facts(result: dict[str, Any]) -> dict[str, str]:
    origin, images = result["origin"], result["images"]
    step = "" if origin["step"] is None else f", step {origin['step']:,}"
    weights = "fresh, not trained" if origin["weights"] == "fresh" else f"{origin['checkpoint']}{step} ({origin['weights']})"
    rows = {"Weights": weights, "Input": f"{result['image_size']} x {result['image_size']} pixels"}
    if result["switches"]:
        rows["Switches"] = ", ".join(f"{name}={value}" for name, value in result["switches"].items())
    rows["Images"] = "none"
    if images:
        left_out = f"; {images['left_out']} could not be used" if images["left_out"] else ""
        split = f", {images['split']}" if images["split"] else ""
        chosen = f"chosen with seed {images['seed']}{left_out}"
        rows["Images"] = f"{images['count']:,} of {images['of']:,} ({images['data']}{split}), {chosen}"
    if result["examples"]:
        rows["Examples"] = "; ".join(f"{example['key']} ({example['label']})" for example in result["examples"])
    return rows


def _figure(picture: Picture) -> Html:
    entry = picture.entry
    links = [html('<a href="{}">{}</a>', file, file.rpartition(".")[2].upper()) for file in entry["files"]]
    return html(
        '<figure><div class="drawing" tabindex="0"><img width="{}" src="data:image/png;base64,{}" alt="{}"></div>'
        '<p>{}</p><p class="quiet">{}</p></figure>',
        picture.width,
        base64.b64encode(picture.png).decode(),
        entry["title"],
        entry["caption"],
        join([*([entry["source"]] if entry["source"] else []), *links], " · "),
    )
