"""Log the metrics of a run to ``metrics.jsonl``, TensorBoard and the console.

If a file cannot be written, or was removed, the run ends on all ranks with one error: a run without its log is of no use.
"""

import json
import logging
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from pipeline.cluster.agreement import do_in_main
from pipeline.cluster.waits import count_waits, waited
from pipeline.cluster.world import World
from pipeline.config import Config, config_to_yaml
from pipeline.errors import UserError, counted
from pipeline.files import DiskRefuses, GrowingFile, being_written, remove_leftovers, replace_text
from pipeline.hardware import memory_gib, peak_flops
from pipeline.logs import console, tensorboard
from pipeline.logs.reduction import MetricReduction, StoreReport, report_bad_samples
from pipeline.metrics import Metric, slow_rank, tells_top5
from pipeline.runs import METRICS, TENSORBOARD
from pipeline.runs.rows import Row, kind_of, parse_row
from pipeline.stream.schedule import Schedule
from pipeline.terminal import duration, paint, shortened

_log = logging.getLogger(__name__)
_PACE = 10.0  # seconds without a line of progress after which a step gets one
_MUCH_WAITING = 0.05  # of the time: the console then names the rank that waits most for data


class RunLog:
    """Collects the metrics of steps and writes them every few steps; only rank 0 writes files. Of a start that was killed, rows after
    ``start_step`` are removed, and those of its evaluation where that is due again. ``flops_per_image``: of a training step, for the
    model FLOPs utilization (MFU); None: there is none. ``bad_samples``: sample -> message, of earlier starts; as an attribute all so
    far, the same on every rank. Raises UserError: on every rank: rank 0 cannot write the files."""

    def __init__(
        self,
        config: Config,
        world: World,
        start_step: int,
        schedule: Schedule,
        flops_per_image: float | None,
        bad_samples: dict[int, str] | None = None,
        store: StoreReport | None = None,
        evaluation_due: bool = False,
    ) -> None:
        self._config, self._world, self._store = config, world, store
        self._flops_per_image, self._schedule, self._last_step = flops_per_image, schedule, schedule.last_step
        # Not of a CPU: its peak has no data sheet, and two measurements on a shared machine differ by a factor of two.
        self._peak: float | None = None
        self._pending: list[tuple[dict[str, Any], Mapping[str, Metric]]] = []  # of each step: where it is, its metrics
        self._met: dict[int, str] = {}  # bad samples of this rank in these steps
        self._reduction = MetricReduction(world)
        count_waits()
        self._refused_since: float | None = None  # when writing first failed
        self.bad_samples = {} if bad_samples is None else bad_samples
        self._first_step = start_step + 1
        self._pace: tuple[int, float] | None = None  # step and time from which the remaining time is extrapolated
        hidden = None if world.is_main else True  # None: where there is no terminal
        self._shown_at = -math.inf  # time of the last line of progress
        self._bar = tqdm(
            total=self._last_step, initial=start_step, desc="training", unit="step", disable=hidden, dynamic_ncols=True
        )
        self.restart_clock()
        do_in_main(lambda: self._open_files(config.folder, start_step, evaluation_due), world)
        if world.device.type != "cpu" and flops_per_image is not None:
            self._peak, source = peak_flops(world.device, config.train.precision)
            self.say(f"peak of one device: {self._peak / 1e12:.3g} TFLOP/s {config.train.precision} ({source})")

    def _open_files(self, run_dir: Path, start_step: int, evaluation_due: bool) -> None:
        path = run_dir / METRICS
        with being_written(path):
            remove_leftovers(path)
            drop_rows_after(path, start_step, evaluation_due)
        self._metrics = GrowingFile(path)
        self._events = tensorboard.EventFile(run_dir / TENSORBOARD, purge_step=start_step + 1)
        self._events.hyperparameters(tensorboard.hyperparameters(self._config), start_step)
        if start_step == 0:
            self._events.text("config", f"```yaml\n{config_to_yaml(self._config)}```", step=0)

    def step(self, step: int, metrics: Mapping[str, Metric], bad_samples: Mapping[int, str] | None = None) -> None:
        """Record a step with what :func:`pipeline.metrics.recording` has collected of it, and the ``bad_samples`` that are new on this
        rank; every ``log.every_steps`` steps write what was recorded. Collective. After the first step of a start, and 10 s without
        a line, rank 0 shows its own figures, which no other rank takes part in."""
        met = bad_samples or {}
        self._pending.append((self._where(step), {**metrics, "bad_samples": Metric("sum", [len(met)])}))
        self._met.update(met)
        self._pace = self._pace or (step, time.perf_counter())
        self._bar.update()
        if step % self._config.log.every_steps == 0:
            self.flush()
        elif step < self._last_step and time.perf_counter() - self._shown_at >= _PACE:  # the last one has its row
            self._show_own(step, metrics)

    def flush(self, to_disk: bool = False) -> None:
        """Write the recorded steps. Collective, at the same step. Raises UserError: on every rank: a file is gone, or could not
        be written for ``checkpoint.retry_seconds``, or there are more bad samples than ``data.max_bad_samples``. ``to_disk``:
        also sync the files, as before the checkpoint of these steps."""
        pending, self._pending = self._pending, []
        if pending:
            self._note_rows(pending)
        self._write_files(to_disk)
        self.restart_clock()
        limit = self._config.data.max_bad_samples
        if len(self.bad_samples) > limit:
            must = f"the number of training samples that cannot be used must be at most data.max_bad_samples {limit}"
            remedy = "the warnings above name them; restore the files, or raise data.max_bad_samples"
            raise UserError(f"{must}, got {len(self.bad_samples)}", remedy)

    def _note_rows(self, pending: list[tuple[dict[str, Any], Mapping[str, Metric]]]) -> None:
        """Turn the metrics of steps into rows, which the next flush writes. Collective."""
        seconds, waits = time.perf_counter() - self._since, waited(self._world.device) - self._waited_before
        if pending[0][0]["step"] == self._first_step:
            waits = 0.0  # libraries were loaded, and rank 0 drew images: no node is at fault
        reduced = self._reduction.rows([metrics for _, metrics in pending], seconds, waits)
        if any(row["bad_samples"] for row in reduced):  # rare: gathering objects is slow
            report_bad_samples(self._world, self._met, self.bad_samples)
        self._met = {}
        after = {"bad_samples": len(self.bad_samples), **(self._store.row() if self._store else {})}
        if self._world.is_main:
            rate = len(pending) * self._config.train.global_batch_size / seconds
            memory, peak_memory = memory_gib(self._world.device)
            mfu = rate * (self._flops_per_image or 0.0) / (self._peak * self._world.size) if self._peak else None
            speed = {"images_per_second": rate, "mfu": mfu, "memory_gib": memory, "peak_memory_gib": peak_memory}
            rows = [{**where, **metrics, **speed, **after} for (where, _), metrics in zip(pending, reduced, strict=True)]
            for row in rows:
                self._add_row(row, group="train")
            self._events.scalars(tensorboard.of_steps(rows), rows[-1]["step"])
            self._show(rows[-1])

    def evaluation(self, step: int, results: dict[str, dict[str, Any]]) -> None:
        """Write an evaluation's results by name of the weights (``model``, ``ema``). Collective. Raises UserError: on every
        rank: a file cannot be written or is gone."""
        where = self._where(step)
        for weights, result in results.items():
            self._add_row({**where, "weights": weights, **result}, "eval", tensorboard.suffix(weights))
            top1 = paint(f"top-1 {result['top1']:.2f} %", "green", sys.stdout)
            top5 = f" top-5 {result['top5']:.2f} %" if tells_top5(len(result["class_count"])) else ""
            found = f"{weights} {top1}{top5} loss {result['loss']:.4f} on {counted(result['count'], 'image')}"
            self.say(f"step {step} epoch {where['epoch']:.2f}: {found}")
        if self._world.is_main:
            self._events.scalars(tensorboard.of_evaluation(results), step)
        self._write_files()

    def scores(self, step: int, scores: dict[str, float]) -> None:
        """Write the scores of another kind of evaluation, by name. Collective, with the errors of :meth:`evaluation`."""
        where = self._where(step)
        self._add_row({**where, **scores}, "eval")
        self.say(f"step {step} epoch {where['epoch']:.2f}: {' '.join(f'{name} {score:.2f}' for name, score in scores.items())}")
        self._write_files()
        self.restart_clock()

    def analysis(self, step: int, measures: dict[str, Any], curves: dict[str, float]) -> None:
        """Add a row ``analysis`` with measures of the weights, and its curves for TensorBoard, to the next flush."""
        self._add_row({**self._where(step), "analysis": measures}, "analysis")
        if self._world.is_main:
            self._events.scalars({f"weights/{name}": value for name, value in curves.items()}, step)

    def image(self, name: str, picture: Tensor, step: int) -> None:
        """Add an image (3, H, W), uint8, to the next flush."""
        if self._world.is_main:
            self._events.image(name, picture, step)

    def restart_clock(self) -> None:
        """Exclude the time since the last flush from the throughput: it was not training."""
        self._since, self._waited_before = time.perf_counter(), waited(self._world.device)

    def say(self, text: str) -> None:
        """Log a line of progress on rank 0."""
        console.say_once(self._world, text)

    def warn(self, text: str) -> None:
        """Log a warning on rank 0."""
        if self._world.is_main:
            _log.warning(text)

    def close(self) -> None:
        """Flush and close the files. Raises UserError: on rank 0: a file cannot be written or is gone."""
        self._bar.close()
        if self._world.is_main:
            self._metrics.close()
            self._events.close()

    def _where(self, step: int) -> dict[str, Any]:
        """What every row begins with."""
        epoch, samples = self._schedule.epoch(step), self._schedule.samples(step)
        return {"step": step, "time": round(time.time(), 3), "epoch": epoch, "samples": samples}

    def _add_row(self, row: dict[str, Any], group: str, suffix: str = "") -> None:
        if not self._world.is_main:
            return
        plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}  # JSON has no NaN
        self._metrics.add(json.dumps(plain).encode() + b"\n")
        self._events.scalars(tensorboard.of_row(row, group, suffix), row["step"])

    def _write_files(self, to_disk: bool = False) -> None:
        """Collective, so that all ranks stop when rank 0 cannot write."""

        def write() -> None:
            try:
                self._metrics.flush(to_disk)
                self._events.flush(to_disk)
                self._refused_since = None
            except DiskRefuses as refusal:  # may pass, as with a checkpoint
                now, limit = time.monotonic(), self._config.checkpoint.retry_seconds
                if self._refused_since is None:
                    self._refused_since = now
                    _log.warning(f"{refusal} Until then it is tried again, for {limit:g} s.")
                if now - self._refused_since >= limit:
                    raise

        do_in_main(write, self._world)

    def _show(self, row: Mapping[str, Any]) -> None:
        slow = row["data_wait"] > _MUCH_WAITING and self._world.size > 1
        where = f" (rank {row['data_wait_rank']} on {row['data_wait_host']})" if slow else ""
        mfu = "" if row["mfu"] is None else f"mfu {row['mfu']:.1%}"
        memory = f"memory {row['memory_gib']:.2f} GiB"
        lr, norm, wait = f"lr {row['lr']:.2e}", f"grad norm {row['grad_norm']:.3g}", f"data wait {row['data_wait']:.1%}{where}"
        culprit = paint(named, "yellow", sys.stdout) if (named := slow_rank(row)) else ""
        parts = [lr, norm, f"{row['images_per_second']:.1f} images/s", mfu, wait, culprit, memory]
        self._show_line(row["step"], row["loss"], parts, [memory, norm, mfu, lr, *([] if slow else [wait])])

    def _show_own(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Show this rank's figures of a step. Not collective."""
        if not self._world.is_main:
            return
        values = metrics["loss"].values
        loss = float(sum(values) / len(values))  # waits for the device
        seconds = time.perf_counter() - self._since
        rate = len(self._pending) * self._config.train.global_batch_size / seconds
        took = f"the first step took {duration(seconds)}" if step == self._first_step else f"{rate:.1f} images/s"
        self._show_line(step, loss, ["(this rank's)" if self._world.size > 1 else "", took], [])

    def _show_line(self, step: int, loss: float, parts: Sequence[str], least: Sequence[str]) -> None:
        """Show progress at a step; a narrow terminal goes without as many of ``least`` as it takes."""
        self._shown_at = time.perf_counter()
        begin = f"step {step}/{self._last_step} epoch {self._schedule.epoch(step):.2f} loss {loss:.4f}"
        assert self._pace  # from the first step on
        (first, began), left = self._pace, ""
        if first < step < self._last_step:  # with evaluations and checkpoints, without this start's first step, which is slow
            epochs = (self._schedule.epoch(first), self._schedule.epoch(step), self._schedule.epoch(self._last_step))
            took, side = time.perf_counter() - began, self._config.model.image_size
            left = f"{duration(self._config.data.seconds_left(took, epochs, side))} left"
        self.say(shortened([begin, *parts, left], least, sys.stdout))


def drop_rows_after(metrics: Path, step: int, evaluation_due: bool = False) -> None:
    """Remove rows of steps and evaluations that the resumed run repeats, and partial lines left by a kill."""
    if not metrics.exists():
        return
    text = metrics.read_text(errors="replace")

    def comes_again(row: Row) -> bool:
        return row["step"] > step or evaluation_due and row["step"] == step and kind_of(row) != "step"

    rows = ((line, parse_row(line.encode())) for line in text.split("\n"))
    kept = "".join(line + "\n" for line, row in rows if row is not None and not comes_again(row))
    if kept != text:
        replace_text(metrics, kept)
