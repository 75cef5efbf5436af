"""What came out, and how it compares with the paper."""

from __future__ import annotations

from typing import Any

from pipeline.page import Html, html, join, table
from pipeline.reports.metric_rows import is_number
from pipeline.reports.paper import PaperRecipe
from pipeline.reports.run_folder import RunFolder
from pipeline.reports.story import Start, clock, duration

_WEIGHTS = {"model": "weights", "ema": "averaged weights"}
_KEYS_SHOWN = 6


def state_of(run: RunFolder) -> str:
    """The state of a run in a few words."""
    last = f" of {run.last_step:,}" if run.last_step is not None else ""
    if run.running:
        return f"in progress at step {run.step:,}{last}"
    return f"finished at step {run.step:,}" if run.finished else f"stopped at step {run.step:,}{last}"


def summary(run: RunFolder, recipe: PaperRecipe | None, starts: list[Start]) -> Html:
    """Tiles with the figures that one asks for first, and the comparison in words."""
    tiles = []
    final = run.final()
    if final:
        kept = _WEIGHTS.get(final["weights"], final["weights"])
        images = f", {final['count']:,} images" if is_number(final.get("count")) else ""
        tiles.append(_tile("Top-1, last evaluation", f"{final['top1']:.2f} %", f"{kept}, step {final['step']:,}{images}"))
        best = run.best()
        if best and best is not final:
            tiles.append(
                _tile("Top-1, best", f"{best['top1']:.2f} %", f"{_WEIGHTS.get(best['weights'], '')}, step {best['step']:,}")
            )
        if is_number(final.get("top5")):
            tiles.append(_tile("Top-5", f"{final['top5']:.2f} %", "same evaluation as the first"))
        if is_number(final.get("loss")):
            tiles.append(_tile("Validation loss", f"{final['loss']:.4f}", "cross-entropy"))
    if recipe and recipe.top1 is not None:
        tiles.append(
            _tile("Paper", f"{recipe.top1:g} %", recipe.file if recipe.comparable else f"{recipe.file}; not this recipe")
        )
    steps, losses = run.curve("loss")
    if len(losses):
        window = losses[-100:]
        shown = f"mean of the last {len(window)} steps" if len(window) > 1 else "one step"
        tiles.append(_tile("Training loss", f"{window.mean():.4f}", shown))
    epochs = run.curve("epoch")[1]
    if len(epochs):
        tiles.append(_tile("Epochs", f"{epochs[-1]:.4g}", f"of {_schedule(run)}" if run.number("train.epochs") else ""))
    time = _time_spent(starts)
    if time:
        tiles.append(_tile("Time", duration(time), f"{len(starts)} start{'s' * (len(starts) != 1)}"))
    nothing = html("<p>No evaluation yet.</p>") if not final else Html("")
    return join([html('<div class="tiles">{}</div>', tiles), nothing, _comparison(run, recipe, final), _evaluations(run)])


def _tile(name: str, value: object, more: object = "") -> Html:
    return html(
        '<div class="tile"><div class="name">{}</div><div class="value">{}</div><div class="more">{}</div></div>',
        name,
        value,
        more,
    )


def _schedule(run: RunFolder) -> str:
    return f"{(run.number('train.epochs') or 0) + (run.number('optim.cooldown_epochs') or 0):g} planned"


def _time_spent(starts: list[Start]) -> float:
    return sum(max(0.0, each.ended - each.began) for each in starts if each.began is not None and each.ended is not None)


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
        return html(
            "<p>{} This run differs from it in {}{}, so the two figures are not of the same training.</p>",
            head,
            join(keys, ", "),
            more,
        )
    if final is None:
        return html("<p>{}</p>", head)
    gap = final["top1"] - recipe.top1
    words = "the same" if abs(gap) < 0.005 else f"{abs(gap):.2f} points {'above' if gap > 0 else 'below'} it"
    unfinished = "" if run.finished else " so far, the schedule has not ended"
    colour = "good" if gap >= -0.2 else "bad" if run.finished else ""
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
            _WEIGHTS.get(row["weights"], row["weights"]),
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
