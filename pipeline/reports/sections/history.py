"""The story of a run: its starts and ends, and its samples and steps that could not be used."""

from __future__ import annotations

import numpy as np

from pipeline.page import Html, html, join, table
from pipeline.reports.run_folder import RunFolder
from pipeline.reports.story import Start, clock, duration

_NAMED = 50  # bad samples, skipped steps
_HOSTS = 4


def history(run: RunFolder, starts: list[Start]) -> Html:
    """Starts as a table, then what went wrong."""
    return join([_sentence(run, starts), _table(starts), _skipped(run), _bad_samples(run)])


def _sentence(run: RunFolder, starts: list[Start]) -> Html:
    if not starts:
        return html("<p>No file tells how this run was started.</p>")
    repeated = sum(start.repeated or 0 for start in starts)
    words = [f"{len(starts)} start{'s' * (len(starts) != 1)}"]
    broken = sum(not start.whole for start in starts)
    if broken:
        words.append(f"{broken} ended by a failure")
    if repeated:
        words.append(f"{repeated:,} steps were taken twice")
    return html("<p>{}.</p>", ", ".join(words))


def _table(starts: list[Start]) -> Html:
    if not starts:
        return Html("")
    rows = []
    for start in starts:
        hosts = ", ".join(start.hosts[:_HOSTS]) + (
            f" and {len(start.hosts) - _HOSTS} more" if len(start.hosts) > _HOSTS else ""
        )
        lasted = duration(start.ended - start.began) if start.began is not None and start.ended is not None else ""
        took = (
            ""
            if start.step is None
            else f"{start.step:,} to {start.reached:,}"
            if start.reached is not None
            else f"{start.step:,} to ?"
        )
        end = html('<span class="{}">{}</span>', "" if start.whole else "bad", start.end)
        rows.append(
            (
                start.number,
                clock(start.began),
                lasted,
                took,
                "" if not start.repeated else f"{start.repeated:,}",
                html("{} on {}", start.world_size or "?", hosts or "?") if start.hosts or start.world_size else "",
                "" if start.zero_stage is None else start.zero_stage,
                start.job or "",
                end,
            )
        )
    head = ["start", "began", "lasted", "steps", "of these repeated", "processes", "ZeRO", "job", "ended"]
    kept = [i for i in range(len(head)) if i < 4 or any(str(row[i]) for row in rows)]
    return table(
        [head[i] for i in kept], [[row[i] for i in kept] for row in rows], numeric=[kept.index(i) for i in (4,) if i in kept]
    )


def _skipped(run: RunFolder) -> Html:
    steps, counts = run.curve("skipped_steps")
    if not len(steps) or counts[-1] <= 0:
        return Html("")
    at = steps[np.flatnonzero(np.diff(np.concatenate([[0.0], counts])) > 0)]
    named = ", ".join(f"{int(step):,}" for step in at[:_NAMED]) + (", ..." if len(at) > _NAMED else "")
    return html("<h3>Skipped steps</h3><p>{} with a gradient that is not finite: step {}.</p>", f"{int(counts.max()):,}", named)


def _bad_samples(run: RunFolder) -> Html:
    """Names from the newest checkpoint; the counts from the log, which may know of more."""
    manifest = run.newest_manifest
    named = manifest.state.bad_samples if manifest else {}
    steps, counts = run.curve("bad_samples")
    count = max(len(named), int(counts.max()) if len(counts) else 0)
    if not count:
        return html("<p>No sample was found that cannot be used.</p>") if len(steps) else Html("")
    replaced = run.curve("replaced")[1]
    words = f"{count:,} training sample{'s' * (count != 1)} cannot be used"
    if len(replaced) and replaced.sum() > 0:
        words += f"; {int(replaced.sum()):,} images of {int(replaced.size):,} steps were replaced by others"
    items = [html("<li>{}</li>", sentence) for sentence in list(named.values())[:_NAMED]]
    missing = count - len(items)
    if missing > 0:
        items.append(html("<li>{} more, which the run's output names.</li>", f"{missing:,}"))
    return html("<h3>Samples that cannot be used</h3><p>{}.</p><ul>{}</ul>", words, items)
