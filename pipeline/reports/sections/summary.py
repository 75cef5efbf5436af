"""Show the result of a run beside the paper's."""

from __future__ import annotations

from typing import Any

from pipeline.logs.console import duration
from pipeline.page import Html, clock, html, join, table
from pipeline.reports.curves import weights_name
from pipeline.reports.papers import PaperRecipe
from pipeline.runs.folder import RunFolder, Start
from pipeline.runs.rows import is_number

_KEYS_SHOWN = 6


def summary(run: RunFolder, recipe: PaperRecipe | None, starts: list[Start]) -> Html:
    """Tiles with the figures that one asks for first, and the comparison in words."""
    tiles: list[tuple[str, str, str]] = []
    final, best, losses, epochs = run.result, run.best(), run.curve("loss")[1], run.curve("epoch")[1]
    if final and best:
        images = f", {final['count']:,} images" if is_number(final.get("count")) else ""
        tiles.append(
            (
                "Top-1, last evaluation",
                f"{final['top1']:.2f} %",
                f"{weights_name(final['weights'])}, step {final['step']:,}{images}",
            )
        )
        if best is not final:
            tiles.append(("Top-1, best", f"{best['top1']:.2f} %", f"{weights_name(best['weights'])}, step {best['step']:,}"))
        if is_number(final.get("top5")):
            tiles.append(("Top-5", f"{final['top5']:.2f} %", "same evaluation as the first"))
        if is_number(final.get("loss")):
            tiles.append(("Validation loss", f"{final['loss']:.4f}", "cross-entropy"))
    if recipe and recipe.top1 is not None:
        tiles.append(("Paper", f"{recipe.top1:g} %", recipe.file + ("" if recipe.comparable else "; not this recipe")))
    if len(losses):
        window = losses[-100:]
        shown = f"mean of the last {len(window)} steps" if len(window) > 1 else "one step"
        tiles.append(("Training loss", f"{window.mean():.4f}", shown))
    if len(epochs):
        planned = (run.number("train.epochs") or 0) + (run.number("optim.cooldown_epochs") or 0)
        tiles.append(("Epochs", f"{epochs[-1]:.4g}", f"of {planned:g} planned" if planned else ""))
    spent = [start.ended - start.began for start in starts if start.began is not None and start.ended is not None]
    if time := sum(max(0.0, seconds) for seconds in spent):
        tiles.append(("Time", duration(time), f"{len(starts)} start{'s' * (len(starts) != 1)}"))
    tile = '<div class="tile"><div class="name">{}</div><div class="value">{}</div><div class="more">{}</div></div>'
    nothing = Html("") if final else html("<p>No evaluation yet.</p>")
    shown_tiles = html('<div class="tiles">{}</div>', [html(tile, *told) for told in tiles])
    return join([shown_tiles, nothing, _comparison(run, recipe, final), _evaluations(run)])


def _comparison(run: RunFolder, recipe: PaperRecipe | None, final: dict[str, Any] | None) -> Html:
    """The paper's figure for this config, or why there is none."""
    if recipe is None:
        return Html("")
    named = html("<code>configs/{}</code>", recipe.file)
    about = f": {recipe.heading.rstrip('.')}" if recipe.heading else ""
    if recipe.top1 is None:
        return html("<p>The nearest recipe is {}{}. No paper has a top-1 figure for it.</p>", named, about)
    head = html("The nearest recipe is {}{}. The paper has {} % top-1 for it.", named, about, f"{recipe.top1:g}")
    if not recipe.comparable:
        keys = [html("<code>{}</code>", key) for key in recipe.decisive[:_KEYS_SHOWN]]
        more = f" and {len(recipe.decisive) - _KEYS_SHOWN} more" if len(recipe.decisive) > _KEYS_SHOWN else ""
        differs = "<p>{} This run differs from it in {}{}, so the two figures are not of the same training.</p>"
        return html(differs, head, join(keys, ", "), more)
    if final is None:
        return html("<p>{}</p>", head)
    gap = final["top1"] - recipe.top1
    words = "the same" if abs(gap) < 0.005 else f"{abs(gap):.2f} points {'above' if gap > 0 else 'below'} it"
    unfinished = "" if run.state.finished else " so far, the schedule has not ended"
    colour = "good" if gap >= -0.2 else "bad" if run.state.finished else ""
    return html('<p>{} This run has {} %: <b class="{}">{}</b>{}.</p>', head, f"{final['top1']:.2f}", colour, words, unfinished)


def _evaluations(run: RunFolder) -> Html:
    rows = run.metrics.evaluations
    if len(rows) < 2:
        return Html("")
    shown = rows[-12:]
    cells = [
        (
            f"{row['step']:,}",
            _number(row.get("epoch"), ".2f"),
            weights_name(row["weights"]),
            _number(row.get("top1"), ".2f"),
            _number(row.get("top5"), ".2f"),
            _number(row.get("loss"), ".4f"),
            clock(row["time"]) if is_number(row.get("time")) else "",
        )
        for row in reversed(shown)
    ]
    title = f"The last {len(shown)} of {len(rows)} evaluations" if len(rows) > len(shown) else "Evaluations"
    head = ("step", "epoch", "weights", "top-1 %", "top-5 %", "loss", "time")
    return html("<h3>{}</h3>{}", title, table(head, cells, numeric=(0, 1, 3, 4, 5)))


def _number(value: Any, form: str) -> str:
    return format(value, form) if is_number(value) else ""
