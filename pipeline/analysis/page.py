"""The page of an analysis: one HTML file with its figures inside, for any width of screen, dark or light."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from html import escape
from typing import Any


@dataclass(frozen=True)
class Picture:
    """A figure as it is on the page. ``entry``: of ``analysis.json``; ``png``: its bytes; ``width``: in CSS pixels."""

    entry: dict[str, Any]
    png: bytes
    width: int


_STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --soft: #57606a; --back: #ffffff; --line: #d5dae0; --link: #0b5cad; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e8ec; --soft: #9aa4ae; --back: #14171b; --line: #353b42; --link: #7db8f5; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1120px; padding: 1.5rem 1rem 4rem; background: var(--back); color: var(--text);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .75rem; }
h2 { font-size: 1.2rem; margin: 0 0 .25rem; }
a { color: var(--link); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; }
nav { margin: 1.25rem 0; padding: .75rem 0; border: solid var(--line); border-width: 1px 0; }
nav a { display: inline-block; margin-right: 1.2rem; }
figure { margin: 2.5rem 0; }
.picture { overflow-x: auto; background: #fff; border: 1px solid var(--line); border-radius: 6px; padding: .5rem; }
.picture img { display: block; margin: 0 auto; max-width: 100%; height: auto; }
figcaption { margin-top: .5rem; }
.source { color: var(--soft); font-size: .9rem; }
section { margin-top: 2.5rem; }
table { border-collapse: collapse; width: 100%; } td { padding: .35rem .75rem .35rem 0; border-top: 1px solid var(--line); vertical-align: top; }
@media (max-width: 700px) { .picture img { max-width: none; } dl { grid-template-columns: 1fr; } dd { margin-bottom: .4rem; }
  td { display: block; padding: .1rem 0; } td + td { border: 0; padding-bottom: .5rem; } }
@media print { nav { display: none; } figure { break-inside: avoid; } }
"""


def page(result: dict[str, Any], pictures: list[Picture]) -> str:
    """The page. Args: result: what is in ``analysis.json``; pictures: in its order."""
    title = f"Inside {result['model']}"
    links = "\n".join(f'<a href="#{escape(each.entry["name"])}">{escape(each.entry["title"])}</a>' for each in pictures)
    nav = f"<nav>{links}</nav>" if len(pictures) > 1 else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{_facts(result)}
{nav}
{"".join(_figure(each) for each in pictures)}
{_omitted(result["omitted"])}
<section><p class="source">Every number behind the figures, with its unit, is in <a href="analysis.json">analysis.json</a>. Layers and
heads are counted from 1 in the figures and from 0 in the file.</p></section>
</body>
</html>
"""


def _facts(result: dict[str, Any]) -> str:
    origin, images = result["origin"], result["images"]
    step = "" if origin["step"] is None else f", step {origin['step']:,}"
    weights = "fresh, not trained" if origin["weights"] == "fresh" else f"{origin['checkpoint']}{step} ({origin['weights']})"
    rows = {"Weights": weights, "Input": f"{result['image_size']} x {result['image_size']} pixels"}
    if result["switches"]:
        rows["Switches"] = ", ".join(f"{name}={value}" for name, value in result["switches"].items())
    if images:
        left_out = f"; {images['left_out']} could not be used" if images["left_out"] else ""
        split = f", {images['split']}" if images["split"] else ""
        rows["Images"] = (
            f"{images['count']:,} of {images['of']:,} ({images['data']}{split}), chosen with seed {images['seed']}{left_out}"
        )
    else:
        rows["Images"] = "none"
    if result["examples"]:
        rows["Examples"] = "; ".join(f"{each['key']} ({each['label']})" for each in result["examples"])
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>\n" for name, text in rows.items()) + "</dl>"


def _figure(picture: Picture) -> str:
    entry = picture.entry
    data = base64.b64encode(picture.png).decode()
    links = " · ".join(f'<a href="{escape(file)}">{file.rpartition(".")[2].upper()}</a>' for file in entry["files"])
    source = f"{escape(entry['source'])} · " if entry["source"] else ""
    return f"""
<figure id="{escape(entry["name"])}">
<h2>{escape(entry["title"])}</h2>
<div class="picture" tabindex="0"><img width="{picture.width}" src="data:image/png;base64,{data}" alt="{escape(entry["title"])}"></div>
<figcaption>{escape(entry["caption"])}</figcaption>
<div class="source">{source}{links}</div>
</figure>
"""


def _omitted(omitted: dict[str, str]) -> str:
    if not omitted:
        return ""
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(why)}</td></tr>\n" for name, why in omitted.items())
    return f'<section id="omitted"><h2>Figures that this analysis does not have</h2>\n<table>{rows}</table></section>'
