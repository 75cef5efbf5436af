"""A run as a page of a terminal, or as a line among several runs."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipeline.logs.console import duration
from pipeline.watch.follow import Run

_BARS, _PLAIN_BARS = "▁▂▃▄▅▆▇█", "_.:-=+*#"  # the second for terminals without Unicode
_LABEL = 11  # columns


def page(run: Run, console: Console, now: float | None = None) -> RenderableType:
    """Everything about one run.

    Args:
        run: as it was looked at last.
        console: whose width and characters are kept to.
        now: Unix time in seconds; None: that of the clock.
    """
    now = time.time() if now is None else now
    unicode = console.encoding.startswith("utf")
    lines = Table.grid(padding=(0, 1))
    lines.add_column(width=_LABEL, style="dim", no_wrap=True)
    lines.add_column(ratio=1)
    lines.expand = True
    for name, content in _lines(run, console.width - _LABEL - 7, now, unicode):
        lines.add_row(name, content)
    what = Text(" ".join(filter(None, [run.path.name or str(run.path), _model(run)])), style="bold")
    return Panel(Group(_progress(run, unicode), Text(), lines), title=what, title_align="left", padding=(1, 2))


def table(runs: Sequence[Run], now: float | None = None) -> RenderableType:
    """A line for each of several runs."""
    now = time.time() if now is None else now
    result = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    result.add_column("run", overflow="fold")
    for name in ("step", "loss", "best top-1", "images/s"):
        result.add_column(name, justify="right", no_wrap=True)
    result.add_column("")
    for run in runs:
        done = f"{run.step / run.last_step:.0%}" if run.last_step else f"{run.step:,}" if run.step else ""
        best, loss, speed = run.best, run.row.get("loss"), run.row.get("images_per_second")
        cells = (run.path.name, done, _number(loss, ".3f"), _number(best and best["top1"], ".1f"), _number(speed, ",.0f"))
        result.add_row(*cells, _state(run, now, short=True))
    return result


def _lines(run: Run, width: int, now: float, unicode: bool) -> list[tuple[str, RenderableType]]:
    """Label and content of each line of the page."""
    row = run.row
    lines: list[tuple[str, RenderableType]] = [("state", _state(run, now))]
    if row:
        lines.append(("loss", Text.assemble(*_curve(run.loss.values, width, unicode, _number(row.get("loss"), ".4f")))))
    for weights, result in run.evaluations.items():
        curve = _curve(run.top1[weights].values, width, unicode, f"{result['top1']:.2f} %")
        lines.append(("top-1" if weights == "model" else f"top-1 {weights}"[:_LABEL], Text.assemble(*curve)))
    if run.best:
        last = next(reversed(run.evaluations.values()))
        kind = "" if run.best["weights"] == "model" else f" ({run.best['weights']})"
        words = f"{run.best['top1']:.2f} % at step {run.best['step']:,}{kind}; last evaluation at step {last['step']:,}"
        lines.append(("best", Text(words)))
    if row:
        speed = [f"{_number(row.get('images_per_second'), ',.1f')} images/s", f"MFU {_number(row.get('mfu'), '.1%')}"]
        wait = row.get("data_wait") or 0.0
        speed_text = Text(", ".join(speed) + ", ")
        lines.append(("speed", speed_text.append(f"data wait {wait:.1%}", style="yellow" if wait > 0.2 else "")))
        memory = f"{_number(row.get('memory_gib'), '.2f')} GiB, peak {_number(row.get('peak_memory_gib'), '.2f')} GiB"
        lines += [("memory", Text(memory)), ("trouble", _trouble(run))]
        rate = f"learning rate {_number(row.get('lr'), '.2e')}, gradient norm {_number(row.get('grad_norm'), '.3g')}"
        lines.append(("optimizer", Text(rate)))
    if run.starts:
        lines.append(("starts", Text(_starts(run))))
    if run.checkpoints:
        count, more = len(run.checkpoints), ", another is being written" if run.saving else ""
        lines.append(
            ("saved", Text(f"{count} checkpoint{'s' * (count > 1)}, the newest of step {run.checkpoints[-1]:,}{more}"))
        )
    return [*lines, *(("problem", Text(problem, style="red")) for problem in run.problems)]


def _progress(run: Run, unicode: bool) -> RenderableType:
    total, step = run.last_step, run.step
    if not total:
        return Text(f"step {step:,}" if step else "")
    epoch = f"epoch {run.row['epoch']:.2f}" if "epoch" in run.row else ""
    left = f"{duration(run.seconds_left)} left" if run.seconds_left is not None and step < total else ""
    words = ", ".join(filter(None, [f"{step / total:.0%}", f"step {step:,} of {total:,}", epoch, left]))
    return Group(
        Text(words), ProgressBar(total=total, completed=min(step, total)) if unicode else Text(_plain_bar(step / total))
    )


def _plain_bar(share: float) -> str:
    return "[" + ("#" * round(40 * min(share, 1))).ljust(40, ".") + "]"


def _state(run: Run, now: float, short: bool = False) -> Text:
    """What the run is doing, as far as its files tell."""
    silence = run.silence(now)
    ago = f"{duration(silence)} ago" if silence is not None else ""
    if not run.path.is_dir():
        return Text(f"waits for {run.path}, which is not there yet" if not short else "waits: not there yet", style="yellow")
    if run.finished:
        return Text("finished" if short else f"finished at step {run.step:,}, {ago}", style="green")
    if not run.holder:
        if not run.starts and not run.step:
            return Text(
                f"waits for a run in {run.path}, which has none yet" if not short else "waits: no run yet", style="yellow"
            )
        reason = run.end or "no process trains it"
        return Text(
            "stopped" if short else f"stopped at step {run.step:,}, {ago} ({reason}); the same command goes on", style="yellow"
        )
    if run.seems_to_hang(now) and silence is not None:
        words = f"no new row for {duration(silence)}"
        return Text(words if short else f"{words}: it hangs, was killed, or its node is down", style="bold red")
    if short:
        return Text(f"{duration(run.seconds_left)} left" if run.seconds_left is not None else "starting", style="green")
    where = f"process {run.holder.get('pid')} on {run.holder.get('host')}"
    job = f", Slurm job {run.holder['slurm_job']}" if run.holder.get("slurm_job") else ""
    doing = "training" if run.row else "starting"
    return Text.assemble((doing, "green"), f", last sign of life {ago or 'none yet'} ({where}{job})")


def _trouble(run: Run) -> Text:
    parts = []
    for key, words in (("bad_samples", "bad samples"), ("skipped_steps", "skipped steps")):
        count = run.row.get(key) or 0
        parts.append(Text(f"{count:,} {words}", style="red" if count else ""))
    restarts = max(0, len(run.starts) - 1)
    parts.append(Text(f"{restarts} restart{'s' * (restarts != 1)}", style="yellow" if restarts else ""))
    return Text(", ").join(parts)


def _starts(run: Run) -> str:
    """The newest start."""
    last = run.starts[-1]
    processes, hosts = last.get("world_size"), last.get("hosts") or []
    where = f"on {hosts[0]}" if len(hosts) == 1 else f"on {len(hosts)} hosts" if hosts else ""
    parts = [
        f"{processes} process{'es' * (processes != 1)} {where}".strip() if processes else where,
        str(last.get("device") or ""),
    ]
    parts += [
        f"from step {last['first_step']:,}" if isinstance(last.get("first_step"), int) else "",
        str(last.get("started", ""))[:16],
    ]
    return f"{len(run.starts)}; the last: " + ", ".join(filter(None, parts)).replace("T", " ")


def _model(run: Run) -> str:
    name, size = run.value("model.name"), run.value("model.image_size")
    return f"({name}, {size} px)" if name and size else ""


def _curve(values: Sequence[float], width: int, unicode: bool, last: str) -> list[str | tuple[str, str]]:
    """The newest value, a sparkline, and the values between which it runs."""
    if len(values) < 2:
        return [(last, "bold")]
    low, high = min(values), max(values)
    scale = f" {low:.3g} to {high:.3g}"
    columns = max(8, min(60, width - len(last) - len(scale) - 2))
    return [(last, "bold"), "  ", (sparkline(values, columns, unicode), "cyan"), (scale, "dim")]


def sparkline(values: Sequence[float], columns: int, unicode: bool = True) -> str:
    """Values as a line of bars, the lowest to the highest; neighbours are averaged to fit."""
    columns = min(columns, len(values))
    edges = [round(i * len(values) / columns) for i in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:])]
    low, high = min(means), max(means)
    bars = _BARS if unicode else _PLAIN_BARS
    top = len(bars) - 1
    return "".join(bars[round((mean - low) / (high - low) * top) if high > low else top // 2] for mean in means)


def _number(value: object, form: str) -> str:
    """A dash for what a row does not have, as a loss that was not finite."""
    return format(value, form) if isinstance(value, (int, float)) else "-"
