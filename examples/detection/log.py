"""Record a run: ``metrics.jsonl``, TensorBoard scalars, the console. Only rank 0 writes."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.detection.config import DetectionConfig
from pipeline.cluster.agreement import do_in_main
from pipeline.cluster.world import World
from pipeline.config import config_to_yaml
from pipeline.files import GrowingFile, remove_leftovers, replace_text, write_error
from pipeline.hardware import memory_gib
from pipeline.logs import console
from pipeline.logs.run_log import drop_rows_after
from pipeline.logs.tensorboard import EventFile
from pipeline.runs import METRICS, TENSORBOARD


@dataclass
class Step:
    """An optimizer step as seen by this rank."""

    step: int
    epoch: float
    lr: float
    losses: dict[str, Tensor]  # () each: means over this rank's micro-batches
    grad_norm: float
    data_seconds: float  # spent waiting for images
    time: float = field(default_factory=time.time)  # Unix time in seconds


class DetectionLog:
    """The log of one start of a run. Collective.

    Args:
        config: of the run.
        world: all ranks.
        first_step: steps done before this start; rows of later ones, of a start that was killed, are removed.
        last_step: of the schedule.

    Raises:
        UserError: on every rank: a file cannot be written.
    """

    def __init__(self, config: DetectionConfig, world: World, first_step: int, last_step: int) -> None:
        self._config, self._world, self._last_step = config, world, last_step
        self._pending: list[Step] = []
        self._since = time.perf_counter()
        do_in_main(lambda: self._open(Path(config.output_dir), first_step), world)

    def _open(self, run: Path, first_step: int) -> None:
        path = run / METRICS
        try:
            remove_leftovers(path)
            drop_rows_after(path, first_step)
            replace_text(run / "config.yaml", config_to_yaml(self._config))
        except OSError as error:
            raise write_error(path, error) from None
        self._metrics = GrowingFile(path)
        self._events = EventFile(run / TENSORBOARD, purge_step=first_step + 1)

    def step(self, step: Step) -> None:
        """Record a step; write what was recorded every ``log.every_steps``. Collective."""
        self._pending.append(step)
        if step.step % self._config.log.every_steps == 0:
            self.flush()

    def flush(self) -> None:
        """Write the recorded steps, means over all ranks, to the disk. Collective."""
        pending, self._pending = self._pending, []
        if pending:
            names = sorted(pending[0].losses)
            values = torch.stack([torch.stack([step.losses[name].double() for name in names]) for step in pending])
            means = (self._world.sum(values) / self._world.size).tolist()  # (steps, losses)
            seconds = time.perf_counter() - self._since
            rate = len(pending) * self._config.train.global_batch_size / seconds
            speed = {
                "images_per_second": rate,
                "data_wait": sum(step.data_seconds for step in pending) / seconds,
                "memory_gib": memory_gib(self._world.device)[1],
            }
            for step, row in zip(pending, means):
                where = {"step": step.step, "time": round(step.time, 3), "epoch": step.epoch}
                losses = {"loss": sum(row), **dict(zip(names, row))}
                self._add({**where, **losses, "lr": step.lr, "grad_norm": step.grad_norm, **speed}, "train")
            self.say(
                f"step {step.step}/{self._last_step} epoch {step.epoch:.2f} loss {sum(row):.4f} lr {step.lr:.2e} "
                f"grad norm {step.grad_norm:.3g} {rate:.1f} images/s data wait {speed['data_wait']:.1%}"
            )
        do_in_main(self._write, self._world)
        self.restart_clock()

    def evaluation(self, step: int, epoch: float, results: dict[str, float]) -> None:
        """Write an evaluation. Collective."""
        self._add({"step": step, "time": round(time.time(), 3), "epoch": epoch, **results}, "eval")
        self.say(f"step {step} epoch {epoch:.2f}: " + " ".join(f"{name} {value:.2f}" for name, value in results.items()))
        do_in_main(self._write, self._world)
        self.restart_clock()

    def restart_clock(self) -> None:
        """Exclude the time since the last flush from the throughput."""
        self._since = time.perf_counter()

    def say(self, text: str) -> None:
        """A line of progress on rank 0."""
        if self._world.is_main:
            console.say(text)

    def close(self) -> None:
        """Flush and close the files. On every rank, without communication."""
        if self._world.is_main:
            self._metrics.close()
            self._events.close()

    def _write(self) -> None:
        self._metrics.flush(to_disk=True)
        self._events.flush(to_disk=True)

    def _add(self, row: dict[str, Any], group: str) -> None:
        if not self._world.is_main:
            return
        plain = {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}
        self._metrics.add(json.dumps(plain).encode() + b"\n")
        points = {f"{group}/{name}": value for name, value in row.items() if name not in ("step", "time", "epoch")}
        self._events.scalars(points, row["step"])


def was_evaluated(run: Path, step: int) -> bool:
    """Whether ``metrics.jsonl`` has an evaluation of ``step``."""
    path = run / METRICS
    if not path.exists():
        return False
    for line in path.read_text(errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # half a line, of a start that was killed
            continue
        if isinstance(row, dict) and row.get("step") == step and "AP" in row:
            return True
    return False
