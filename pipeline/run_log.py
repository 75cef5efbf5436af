"""What a run leaves behind besides checkpoints: metrics.jsonl, TensorBoard events, its config and environment.

::

    RUN/config.yaml         the resolved config
    RUN/environment.json    versions, git commit, hosts, Slurm job; one entry per start
    RUN/metrics.jsonl       one JSON object a line, a line per step and per evaluation
    RUN/tensorboard/        the same as curves, and images
"""

from __future__ import annotations

import json
import math
import os
import platform
import socket
import subprocess
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from pipeline.bad_sample_report import BadSampleReport
from pipeline.config import Config, config_to_yaml
from pipeline.distributed import World
from pipeline.errors import UserError
from pipeline.hardware import memory_gib, peak_flops

METRICS, CONFIG, ENVIRONMENT, TENSORBOARD = "metrics.jsonl", "config.yaml", "environment.json", "tensorboard"


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


class RunLog:
    """Collects steps and writes them every few; only the main process writes files.

    Args:
        config: the run's config.
        world: all processes.
        start_step, total_steps: of this start; rows after ``start_step`` are from a start that was cut off and go.
        flops_per_image: of a training step, for the model FLOP utilisation.
    """

    def __init__(self, config: Config, world: World, start_step: int, total_steps: int, flops_per_image: float) -> None:
        self._config, self._world = config, world
        self._flops_per_image = flops_per_image
        self._peak, source = peak_flops(world.device, config.train.precision)
        self._pending: list[StepRecord] = []
        self._bad_samples = BadSampleReport(world)
        self._since = time.perf_counter()
        self._bar = tqdm(
            total=total_steps, initial=start_step, desc="training", unit="step", disable=None if world.is_main else True
        )
        if not world.is_main:
            return
        from torch.utils.tensorboard import SummaryWriter

        run_dir = Path(config.output_dir)
        self._metrics = run_dir / METRICS
        _drop_rows_after(self._metrics, start_step)
        self._writer = SummaryWriter(str(run_dir / TENSORBOARD), purge_step=start_step + 1)
        if start_step == 0:
            self._writer.add_text("config", f"```yaml\n{config_to_yaml(config)}```")
        self.say(f"peak of one device: {self._peak / 1e12:.3g} TFLOP/s {config.train.precision} ({source})")

    def step(self, record: StepRecord) -> None:
        """Note a step; every ``log.every_steps`` steps write what was noted."""
        self._pending.append(record)
        self._bar.update()
        if record.step % self._config.log.every_steps == 0:
            self.flush()

    def flush(self) -> None:
        """Write the noted steps; every process must call at the same step.

        Raises:
            UserError: a loss or gradient norm is not finite, or the processes together met too many bad samples.
        """
        if not self._pending:
            return
        losses = self._world.sum(torch.stack([r.loss.detach().double() for r in self._pending])) / self._world.size
        losses = losses.tolist()  # waits for the device
        replaced = self._count_bad_samples()
        bad_samples = len(self._bad_samples)
        norms = [float(r.grad_norm) for r in self._pending]
        seconds = time.perf_counter() - self._since
        images = len(self._pending) * self._config.train.global_batch_size
        rate = images / seconds
        memory, peak_memory = memory_gib(self._world.device)
        speed = {
            "images_per_second": rate,
            "mfu": rate * self._flops_per_image / (self._peak * self._world.size),
            "data_wait": sum(r.data_seconds for r in self._pending) / seconds,
            "memory_gib": memory,
            "peak_memory_gib": peak_memory,
        }
        if self._world.is_main:
            for record, loss, norm, count in zip(self._pending, losses, norms, replaced):
                row = {"step": record.step, "epoch": record.epoch, "samples": record.samples, "loss": loss}
                row = {**row, "lr": record.lr, "grad_norm": norm, **speed, "replaced": count, "bad_samples": bad_samples}
                self._write(row, group="train")
            self._show(self._pending[-1], losses[-1], norms[-1], speed)
        finite = [math.isfinite(loss) and math.isfinite(norm) for loss, norm in zip(losses, norms)]
        bad = [(r.step, loss, norm) for r, loss, norm, ok in zip(self._pending, losses, norms, finite) if not ok]
        self._pending.clear()
        self._since = time.perf_counter()
        limit = self._config.data.max_bad_samples
        if bad_samples > limit:
            raise UserError(
                f"{bad_samples} training samples cannot be used, data.max_bad_samples allows {limit}: the warnings above name them; "
                f"restore the files, or raise data.max_bad_samples."
            )
        if bad:
            raise UserError(
                f"at step {bad[0][0]} the loss is {bad[0][1]} and the gradient norm {bad[0][2]}, finite numbers needed: lower optim.lr, "
                f"raise optim.warmup_epochs or set optim.clip_grad_norm, with another output_dir; checkpoints from before are unharmed."
            )

    def _count_bad_samples(self) -> list[int]:
        """Images replaced in each noted step, over all processes. Names the bad samples that are new."""
        met = {sample: sentence for record in self._pending for sample, sentence in record.bad_samples.items()}
        counts = [float(record.replaced) for record in self._pending] + [float(len(met))]
        *replaced, new = self._world.sum(torch.tensor(counts, dtype=torch.float64, device=self._world.device)).tolist()
        if new:  # seldom: gathering objects is slow
            self._bad_samples.update(met)
        return [int(count) for count in replaced]

    def evaluation(self, step: int, epoch: float, samples: int, results: dict[str, dict[str, float]]) -> None:
        """Write an evaluation's results, by name of the weights (``model``, ``ema``)."""
        self._since = time.perf_counter()  # the time it took is not the training's
        if not self._world.is_main:
            return
        where = {"step": step, "epoch": epoch, "samples": samples}
        for weights, result in results.items():
            self._write({**where, "weights": weights, **result}, group="eval" if weights == "model" else f"eval_{weights}")
            self.say(
                f"step {step} epoch {epoch:.2f}: {weights} top-1 {result['top1']:.2f} % top-5 {result['top5']:.2f} % "
                f"loss {result['loss']:.4f} on {result['count']} images"
            )

    def images(self, name: str, grid: Tensor, step: int) -> None:
        """Write a picture (3, H, W) or (1, H, W), values in [0, 1]."""
        if self._world.is_main:
            self._writer.add_image(name, grid, step)

    def restart_clock(self) -> None:
        """After something that is not training (a checkpoint): its time does not count."""
        self._since = time.perf_counter()

    def say(self, text: str) -> None:
        """One line for humans, from the main process."""
        if self._world.is_main:
            self._bar.write(text) if not self._bar.disable else print(text, flush=True)

    def close(self) -> None:
        self._bar.close()
        if self._world.is_main:
            self._writer.close()

    def _write(self, row: dict[str, Any], group: str) -> None:
        with open(self._metrics, "a") as file:
            plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}  # JSON has no NaN
            file.write(json.dumps(plain) + "\n")
        for name, value in row.items():
            if isinstance(value, (int, float)) and name != "step":
                self._writer.add_scalar(f"{group}/{name}", value, row["step"])

    def _show(self, record: StepRecord, loss: float, norm: float, speed: dict[str, float]) -> None:
        if self._bar.disable:
            self.say(
                f"step {record.step}/{self._bar.total} epoch {record.epoch:.2f} loss {loss:.4f} lr {record.lr:.2e} "
                f"grad norm {norm:.3g} {speed['images_per_second']:.1f} images/s mfu {speed['mfu']:.1%} "
                f"data wait {speed['data_wait']:.1%} memory {speed['memory_gib']:.2f} GiB"
            )
        else:
            self._bar.set_postfix_str(f"loss {loss:.3f}, {speed['images_per_second']:.0f} images/s")


def write_run_files(config: Config, world: World) -> None:
    """Write ``config.yaml`` and add this start to ``environment.json``; every process must call."""
    hosts = sorted(set(world.gather(socket.gethostname())))
    if not world.is_main:
        return
    run_dir = Path(config.output_dir)
    (run_dir / CONFIG).write_text(config_to_yaml(config))
    path = run_dir / ENVIRONMENT
    starts = json.loads(path.read_text()) if path.exists() and path.stat().st_size else []
    starts.append(
        {
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "python": platform.python_version(),
            "packages": {name: version(name) for name in ("torch", "deepspeed", "nvidia-dali-cuda130", "numpy")},
            "git_commit": _git_commit(),
            "world_size": world.size,
            "device": torch.cuda.get_device_name(world.device)
            if world.device.type == "cuda"
            else platform.processor() or "cpu",
            "hosts": hosts,
            "slurm": {k: v for k, v in os.environ.items() if k in ("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_RESTART_COUNT")},
        }
    )
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(starts, indent=1) + "\n")
    os.replace(temporary, path)


def _git_commit() -> str | None:
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None  # installed without its repository


def _drop_rows_after(metrics: Path, step: int) -> None:
    """Remove rows of steps that the resumed run takes again, and a last line that was cut off."""
    if not metrics.exists():
        return
    kept = []
    for line in metrics.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            break
    temporary = metrics.with_suffix(".tmp")
    temporary.write_text("".join(kept))
    os.replace(temporary, metrics)
