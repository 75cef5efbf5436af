"""What a run leaves behind besides checkpoints: metrics.jsonl, TensorBoard events, its config and environment.

::

    RUN/config.yaml         the resolved config                                              (run_files.py)
    RUN/environment.json    versions, git commit, hosts, Slurm job; one entry per start      (run_files.py)
    RUN/metrics.jsonl       one JSON object a line, a line per step and per evaluation; ``time`` is seconds since 1970
    RUN/tensorboard/        the same as curves, and images                                   (event_file.py)

A file that cannot be written, or that somebody removed, ends the run in every process with one sentence: rows that nobody
will ever see are no log.
"""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from pipeline.config import Config, config_to_yaml
from pipeline.distributed.agreement import do_in_main
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.files import DiskRefuses, GrowingFile, remove_leftovers, replace_text, write_error
from pipeline.logs import console
from pipeline.logs.bad_sample_report import BadSampleReport
from pipeline.logs.hardware import memory_gib, peak_flops

METRICS, TENSORBOARD = "metrics.jsonl", "tensorboard"

# TensorBoard sorts groups and the cards in them by name, and opens the first two groups: eval and train are to be those.
_UTILIZATION = ("images_per_second", "mfu", "data_wait", "memory_gib", "peak_memory_gib")
_TROUBLE = ("replaced", "bad_samples", "skipped_steps")
_GROUPS = {**dict.fromkeys(_UTILIZATION, "utilization"), **dict.fromkeys(_TROUBLE, "trouble")}
_NO_CURVES = ("step", "time", "epoch", "samples", "correct1", "correct5", "count")  # straight lines, or another curve's again


@dataclass
class StepRecord:
    """One optimizer step as this process saw it."""

    step: int
    epoch: float
    samples: int
    lr: float
    loss: Tensor  # (), on the device: fetched only when the log is written, and so is
    grad_norm: Tensor | float
    data_seconds: float  # spent waiting for batches
    replaced: int = 0  # images of this process's share that stood in for bad ones
    bad_samples: dict[int, str] = field(default_factory=dict)  # that this process met in this step: sample -> sentence
    skipped_steps: int = 0  # so far in the run, this step included: without a finite gradient, so they changed no weight
    time: float = field(default_factory=time.time)  # when it was done: seconds since 1970


class RunLog:
    """Collects steps and writes them every few; only the main process writes files.

    Args:
        config: the run's config.
        world: all processes.
        start_step, total_steps: of this start; rows after ``start_step`` are from a start that was cut off and go.
        flops_per_image: of a training step, for the model FLOP utilisation.
        bad_samples: those of earlier starts; None: there were none.

    Attributes:
        bad_samples: all of them so far.

    Raises:
        UserError: in every process: the main one cannot write the files.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        start_step: int,
        total_steps: int,
        flops_per_image: float,
        bad_samples: BadSampleReport | None = None,
    ) -> None:
        self._config, self._world = config, world
        self._flops_per_image = flops_per_image
        self._peak, source = peak_flops(world.device, config.train.precision)
        self._pending: list[StepRecord] = []
        self._refused_since: float | None = None  # when the disk began to refuse rows
        self.bad_samples = BadSampleReport(world) if bad_samples is None else bad_samples
        self._since = time.perf_counter()
        self._total_steps = total_steps
        self._pace: tuple[int, float] | None = None  # step and time from which on the time left is judged
        self._bar = tqdm(
            total=total_steps, initial=start_step, desc="training", unit="step", disable=None if world.is_main else True
        )
        do_in_main(lambda: self._open_files(Path(config.output_dir), start_step), world)
        self.say(f"peak of one device: {self._peak / 1e12:.3g} TFLOP/s {config.train.precision} ({source})")

    def _open_files(self, run_dir: Path, start_step: int) -> None:
        # Here, because TensorBoard takes a second to import, and only the main process needs it.
        from pipeline.logs.event_file import EventFile

        path = run_dir / METRICS
        try:
            remove_leftovers(path)
            _drop_rows_after(path, start_step)
        except OSError as error:
            raise write_error(path, error) from None
        self._metrics = GrowingFile(path)
        self._events = EventFile(run_dir / TENSORBOARD, purge_step=start_step + 1)
        if start_step == 0:
            self._events.text("config", f"```yaml\n{config_to_yaml(self._config)}```", step=0)

    def step(self, record: StepRecord) -> None:
        """Note a step; every ``log.every_steps`` steps write what was noted."""
        self._pending.append(record)
        self._pace = self._pace or (record.step, time.perf_counter())
        self._bar.update()
        if record.step % self._config.log.every_steps == 0:
            self.flush()

    def flush(self, to_disk: bool = False) -> None:
        """Write the noted steps; every process must call at the same step.

        Args:
            to_disk: also wait until all rows would survive a power cut, as before a checkpoint that comes after them.

        Raises:
            UserError: in every process: a file is gone, or could not be written for ``checkpoint.retry_seconds``, or the processes
                together met too many bad samples.
        """
        pending, self._pending = self._pending, []
        if pending:
            self._note_rows(pending)
        self._write_files(to_disk)
        self._since = time.perf_counter()
        limit = self._config.data.max_bad_samples
        if len(self.bad_samples) > limit:
            raise UserError(
                f"{len(self.bad_samples)} training samples cannot be used, data.max_bad_samples allows {limit}: the warnings above name "
                f"them; restore the files, or raise data.max_bad_samples."
            )

    def _note_rows(self, records: list[StepRecord]) -> None:
        """Make rows of steps, for the next writing of the files."""
        means = self._world.sum(torch.stack([r.loss.detach().double() for r in records])) / self._world.size
        losses = means.tolist()  # waits for the device
        replaced = self._count_bad_samples(records)
        norms = [float(r.grad_norm) for r in records]
        if self._world.is_main:
            speed = self._speed(records)
            for record, loss, norm, count in zip(records, losses, norms, replaced):
                row = {"step": record.step, "time": round(record.time, 3), "epoch": record.epoch, "samples": record.samples}
                row = {**row, "loss": loss, "lr": record.lr, "grad_norm": norm, **speed, "replaced": count}
                row = {**row, "bad_samples": len(self.bad_samples), "skipped_steps": record.skipped_steps}
                self._add_row(row, group="train")
            self._show(records[-1], losses[-1], norms[-1], speed)

    def _speed(self, records: list[StepRecord]) -> dict[str, float]:
        """What the time since the last writing was spent on."""
        seconds = time.perf_counter() - self._since
        rate = len(records) * self._config.train.global_batch_size / seconds
        memory, peak_memory = memory_gib(self._world.device)
        return {
            "images_per_second": rate,
            "mfu": rate * self._flops_per_image / (self._peak * self._world.size),
            "data_wait": sum(r.data_seconds for r in records) / seconds,
            "memory_gib": memory,
            "peak_memory_gib": peak_memory,
        }

    def _count_bad_samples(self, records: list[StepRecord]) -> list[int]:
        """Images replaced in each step, over all processes. Names the bad samples that are new."""
        met = {sample: sentence for record in records for sample, sentence in record.bad_samples.items()}
        counts = [float(record.replaced) for record in records] + [float(len(met))]
        *replaced, new = self._world.sum(torch.tensor(counts, dtype=torch.float64, device=self._world.device)).tolist()
        if new:  # seldom: gathering objects is slow
            self.bad_samples.update(met)
        return [int(count) for count in replaced]

    def evaluation(self, step: int, epoch: float, samples: int, results: dict[str, dict[str, float]]) -> None:
        """Write an evaluation's results, by name of the weights (``model``, ``ema``); every process must call.

        Raises:
            UserError: in every process: a file cannot be written or is gone.
        """
        where = {"step": step, "time": round(time.time(), 3), "epoch": epoch, "samples": samples}
        for weights, result in results.items():
            if self._world.is_main:
                self._add_row({**where, "weights": weights, **result}, "eval", "" if weights == "model" else f"_{weights}")
            self.say(
                f"step {step} epoch {epoch:.2f}: {weights} top-1 {result['top1']:.2f} % top-5 {result['top5']:.2f} % "
                f"loss {result['loss']:.4f} on {result['count']} images"
            )
        self._write_files()
        self._since = time.perf_counter()  # the time it took is not the training's

    def image(self, name: str, picture: Tensor, step: int) -> None:
        """Add a picture (3, H, W), uint8, to what is written next."""
        if self._world.is_main:
            self._events.image(name, picture, step)

    def restart_clock(self) -> None:
        """After something that is not training (a checkpoint): its time does not count."""
        self._since = time.perf_counter()

    def say(self, text: str) -> None:
        """One line for humans, from the main process."""
        if self._world.is_main:
            console.say(text)

    def close(self) -> None:
        """Write what is left.

        Raises:
            UserError: in the main process: a file cannot be written or is gone.
        """
        self._bar.close()
        if self._world.is_main:
            self._metrics.close()
            self._events.close()

    def _add_row(self, row: dict[str, Any], group: str, suffix: str = "") -> None:
        plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}  # JSON has no NaN
        self._metrics.add(json.dumps(plain).encode() + b"\n")
        for name, value in row.items():
            if isinstance(value, (int, float)) and name not in _NO_CURVES:
                self._events.scalar(f"{_GROUPS.get(name, group)}/{name}{suffix}", value, row["step"])

    def _write_files(self, to_disk: bool = False) -> None:
        """Every process must call, so that all of them stop when the main one cannot write."""

        def write() -> None:
            try:
                self._metrics.flush(to_disk)
                self._events.flush(to_disk)
                self._refused_since = None
            except DiskRefuses as refusal:  # as with a checkpoint, it may be over soon
                now, patience = time.monotonic(), self._config.checkpoint.retry_seconds
                if self._refused_since is None:
                    self._refused_since = now
                    tqdm.write(f"warning: {refusal} Until then it is tried again, for {patience:g} s.", file=sys.stderr)
                if now - self._refused_since >= patience:
                    raise

        do_in_main(write, self._world)

    def _show(self, record: StepRecord, loss: float, norm: float, speed: dict[str, float]) -> None:
        self.say(
            f"step {record.step}/{self._total_steps} epoch {record.epoch:.2f} loss {loss:.4f} lr {record.lr:.2e} "
            f"grad norm {norm:.3g} {speed['images_per_second']:.1f} images/s mfu {speed['mfu']:.1%} "
            f"data wait {speed['data_wait']:.1%} memory {speed['memory_gib']:.2f} GiB{self._time_left(record.step)}"
        )

    def _time_left(self, step: int) -> str:
        """At the pace of this start so far, evaluations and checkpoints included, its first step, which is slow, not."""
        assert self._pace  # from the first step on
        first, began = self._pace
        if not first < step < self._total_steps:
            return ""
        return f", {console.duration((time.perf_counter() - began) / (step - first) * (self._total_steps - step))} left"


def _drop_rows_after(metrics: Path, step: int) -> None:
    """Remove rows of steps that the resumed run takes again, and lines that a kill cut off."""
    if not metrics.exists():
        return
    text = metrics.read_text(errors="replace")
    kept = "".join(line + "\n" for line in text.splitlines() if _step_of(line) <= step)
    if kept != text:
        replace_text(metrics, kept)


def _step_of(line: str) -> float:
    """Of a row of metrics.jsonl; infinity if it is none."""
    try:
        return json.loads(line)["step"] + 0
    except (ValueError, KeyError, TypeError):
        return math.inf
