"""Keep the curves of runs up to date from their files, and draw a run as a page of a terminal, or as a line among several."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipeline.errors import counted
from pipeline.metrics import slow_rank
from pipeline.runs import METRICS
from pipeline.runs.files import RunFiles
from pipeline.runs.rows import Row, Tail, is_number, kind_of, parse_row
from pipeline.runs.state import State, state_of
from pipeline.terminal import duration

_BARS, _PLAIN_BARS = "▁▂▃▄▅▆▇█", "_.:-=+*#"  # the second for terminals without Unicode
_LABEL = 11  # columns
_POINTS = 2048  # of a curve that are kept


class Curve:
    """Values by step, of which at most a few thousand are kept: neighbours are averaged."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self._rows, self._sum, self._count = 1, 0.0, 0  # rows per value; sum and number of those of the next one

    def add(self, value: object) -> None:
        """Add the next value; one that is not a finite number is left out."""
        if not is_number(value):
            return
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count == self._rows:
            self.values.append(self._sum / self._rows)
            self._sum, self._count = 0.0, 0
        if len(self.values) == _POINTS:
            self.values = [(a + b) / 2 for a, b in zip(self.values[::2], self.values[1::2])]
            self._rows *= 2


class LiveRun(RunFiles):
    """A run folder with the curves of its metrics. Each look reads what was added, and survives what a resume rewrites."""

    row: Row  # the newest row of a step; empty before there is one
    evaluations: dict[str, Row]  # weights (``model``, ``ema``) -> the newest row
    best: Row | None  # the evaluation with the best top-1; None before there is one
    loss: Curve
    top1: dict[str, Curve]  # weights -> curve

    def __init__(self, path: Path) -> None:
        self._metrics = Tail(path / METRICS)
        self._forget()
        super().__init__(path)

    def look(self) -> None:
        """Read what is new."""
        super().look()
        if self._metrics.was_replaced():
            self._metrics.rewind()
            self._forget()
        try:
            for line in self._metrics.lines():
                if (row := parse_row(line)) is not None:
                    self._note(row)
        except OSError as error:
            self.problems.append(f"{METRICS} cannot be read ({error.strerror}).")

    def _forget(self) -> None:
        self.row, self.evaluations, self.best = {}, {}, None
        self.loss, self.top1 = Curve(), {}

    def _note(self, row: Row) -> None:
        kind = kind_of(row)
        if kind == "evaluation":
            weights = str(row["weights"])
            self.evaluations[weights] = row
            self.top1.setdefault(weights, Curve()).add(row["top1"])
            if self.best is None or row["top1"] > self.best["top1"]:
                self.best = row
        elif kind == "step":
            self.row = row
            self.loss.add(row.get("loss"))


def page(run: LiveRun, console: Console, now: float | None = None) -> RenderableType:
    """Everything about one run, as it was looked at last, for the console. ``now``: Unix time in seconds; None: by the clock."""
    state, unicode = state_of(run, now), console.encoding.startswith("utf")
    lines = Table.grid(padding=(0, 1), expand=True)
    lines.add_column(width=_LABEL, style="dim", no_wrap=True)
    lines.add_column(ratio=1)
    for name, content in _lines(run, state, console.width - _LABEL - 7, unicode):
        lines.add_row(name, content)
    name, size = run.value("model.name"), run.value("model.image_size")
    model = f" ({name}, {size} px)" if name and size else ""
    what = Text(f"{run.path.name or run.path}{model}", style="bold")
    return Panel(Group(_progress(run, state, unicode), Text(), lines), title=what, title_align="left", padding=(1, 2))


def table(runs: Sequence[LiveRun], now: float | None = None) -> RenderableType:
    """A line for each of several runs."""
    result = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    result.add_column("run", overflow="fold")
    for name in ("step", "loss", "best top-1", "images/s"):
        result.add_column(name, justify="right", no_wrap=True)
    result.add_column("")
    for run in runs:
        state = state_of(run, now)
        done = f"{state.step / state.last_step:.0%}" if state.last_step else f"{state.step:,}" if state.step else ""
        loss, best = _number(run.row, "loss", ".3f"), _number(run.best or {}, "top1", ".1f")
        speed = _number(run.row, "images_per_second", ",.0f")
        left = f"{duration(state.seconds_left)} left" if state.seconds_left is not None else "running"
        words = {"waiting": str(state), "running": left}.get(state.name, state.name)
        result.add_row(run.path.name, done, loss, best, speed, Text(words, style=_COLOURS.get(state.name, "yellow")))
    return result


def _lines(run: LiveRun, state: State, width: int, unicode: bool) -> list[tuple[str, RenderableType]]:
    """Label and content of each line of the page."""
    row = run.row
    lines: list[tuple[str, RenderableType]] = [("state", _state(run, state))]
    if row:
        lines.append(("loss", _curve(run.loss, width, unicode, _number(row, "loss", ".4f"))))
    for weights, result in run.evaluations.items():
        label = "top-1" if weights == "model" else f"top-1 {weights}"[:_LABEL]
        lines.append((label, _curve(run.top1[weights], width, unicode, f"{result['top1']:.2f} %")))
    if run.best:
        last = next(reversed(run.evaluations.values()))
        kind = "" if run.best["weights"] == "model" else f" ({run.best['weights']})"
        words = f"{run.best['top1']:.2f} % at step {run.best['step']:,}{kind}; last evaluation at step {last['step']:,}"
        lines.append(("best", Text(words)))
    if row:
        wait = row.get("data_wait") or 0.0
        mfu = f"MFU {_number(row, 'mfu', '.1%')}, " if row.get("mfu") is not None else ""  # not known of CPUs
        speed = Text(f"{_number(row, 'images_per_second', ',.1f')} images/s, {mfu}")
        speed.append(f"data wait {wait:.1%}", style="yellow" if wait > 0.2 else "")
        memory = f"{_number(row, 'memory_gib', '.2f')} GiB, peak {_number(row, 'peak_memory_gib', '.2f')} GiB"
        rate = f"learning rate {_number(row, 'lr', '.2e')}, gradient norm {_number(row, 'grad_norm', '.3g')}"
        culprit = [("slowest", Text(slow, style="yellow"))] if (slow := slow_rank(row)) else []
        lines += [("speed", speed), *culprit, ("memory", Text(memory)), ("trouble", _trouble(run)), ("optimizer", Text(rate))]
    if run.starts:
        lines.append(("starts", Text(_starts(run))))
    if run.checkpoints:
        more = ", another is being written" if run.saving and state.alive else ""
        newest = f"{counted(len(run.checkpoints), 'checkpoint')}, the newest of step {run.checkpoints[-1].step:,}"
        left = run.row.get("upload_backlog_mib") or 0.0
        lines.append(("saved", Text(newest + more + (f", {left:,.1f} MiB are not in the store yet" if left else ""))))
    return [*lines, *(("problem", Text(problem, style="red")) for problem in run.problems)]


def _progress(run: LiveRun, state: State, unicode: bool) -> RenderableType:
    total, step = state.last_step, state.step
    if not total:
        return Text(f"step {step:,}" if step else "")
    epoch = f"epoch {run.row['epoch']:.2f}" if "epoch" in run.row else ""
    left = f"{duration(state.seconds_left)} left" if state.seconds_left is not None and step < total else ""
    words = ", ".join(filter(None, [f"{step / total:.0%}", f"step {step:,} of {total:,}", epoch, left]))
    done = min(step, total)
    plain = Text("[" + ("#" * round(40 * done / total)).ljust(40, ".") + "]")
    return Group(Text(words), ProgressBar(total=total, completed=done) if unicode else plain)


_COLOURS = {"finished": "green", "running": "green", "hung": "bold red", "killed": "bold red"}


def _state(run: LiveRun, state: State) -> Text:
    """What the run is doing, as far as its files tell."""
    ago = f"{duration(state.silence)} ago" if state.silence is not None else "none yet"
    resumes = "the same command resumes it" + (f" from step {state.saved:,}" if state.saved is not None else "")
    if state.name == "waiting" and not state.holder:
        words = f"waits for a run in {run.path}, which has none yet"
        return Text(words if run.path.is_dir() else f"waits for {run.path}, which is not there yet", style="yellow")
    told = {
        "waiting": f"starting, last activity {ago}: {state.holder}",
        "running": f"running, last activity {ago}: {state.holder}",
        "hung": f"hung: no activity for {duration(state.silence or 0)} from {state.holder}",
        "killed": f"{state}, {ago}, without a word: killed, or its node is down; {resumes}",
        "stopped": f"{state}, {ago} ({state.reason or 'no process trains it'}); {resumes}",
        "finished": f"{state}, {ago}",
    }
    return Text(told[state.name], style=_COLOURS.get(state.name, "yellow"))


def _trouble(run: LiveRun) -> Text:
    parts = []
    for key, words in (("bad_samples", "bad samples"), ("skipped_steps", "skipped steps")):
        count = run.row.get(key) or 0
        parts.append(Text(f"{count:,} {words}", style="red" if count else ""))
    restarts = max(0, len(run.starts) - 1)
    parts.append(Text(counted(restarts, "restart"), style="yellow" if restarts else ""))
    return Text(", ").join(parts)


def _starts(run: LiveRun) -> str:
    """The newest start."""
    last = run.starts[-1]
    processes, hosts = last.get("world_size"), last.get("hosts") or []
    where = f"on {hosts[0]}" if len(hosts) == 1 else f"on {len(hosts)} hosts" if hosts else ""
    ranks = f"{counted(processes, 'process')} {where}".strip() if processes else where
    begun = f"from step {last['first_step']:,}" if isinstance(last.get("first_step"), int) else ""
    parts = (ranks, str(last.get("device") or ""), begun, str(last.get("started", ""))[:16])
    return f"{len(run.starts)}; the last: " + ", ".join(filter(None, parts)).replace("T", " ")


def _curve(curve: Curve, width: int, unicode: bool, last: str) -> Text:
    """The newest value, a sparkline, and the values between which it runs."""
    if len(curve.values) < 2:
        return Text(last, style="bold")
    scale = f" {min(curve.values):.3g} to {max(curve.values):.3g}"
    columns = max(8, min(60, width - len(last) - len(scale) - 2))
    return Text.assemble((last, "bold"), "  ", (sparkline(curve.values, columns, unicode), "cyan"), (scale, "dim"))


def sparkline(values: Sequence[float], columns: int, unicode: bool = True) -> str:
    """Values as a line of bars, the lowest to the highest; neighbours are averaged to fit."""
    columns = min(columns, len(values))
    edges = [round(i * len(values) / columns) for i in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:])]
    low, high = min(means), max(means)
    bars = _BARS if unicode else _PLAIN_BARS
    top = len(bars) - 1
    return "".join(bars[round((mean - low) / (high - low) * top) if high > low else top // 2] for mean in means)


def _number(row: Row, name: str, form: str) -> str:
    """A dash for what a row does not have, as a loss that was not finite."""
    value = row.get(name)
    return format(value, form) if isinstance(value, (int, float)) else "-"
