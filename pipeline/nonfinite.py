"""A step whose gradient is not finite: skipped and counted, or the end of the run with all that reproduces it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from pipeline.agreement import Agreement
from pipeline.checkpoint import Saver
from pipeline.config import config_to_yaml
from pipeline.data.plan import BatchRequest
from pipeline.errors import UserError
from pipeline.files import replace_text

if TYPE_CHECKING:
    from pipeline.run import Run

FOLDER, REPORT = "nonfinite", "report.json"


@dataclass(frozen=True)
class MicroBatch:
    """What a process trained on in one pass."""

    request: BatchRequest
    loss: Tensor  # ()


def skip_or_stop(run: Run, step: int, seen: list[MicroBatch]) -> None:
    """The step changed neither weights nor statistics: count it, or stop; every process must call.

    Args:
        run: as it was before the step.
        step: the number of the step that was not taken.
        seen: this process's micro-batches of it.

    Raises:
        UserError: more than ``train.max_skipped_steps``. The run's ``nonfinite/step-...`` is then a run folder of its own: the state
            before the step, a config that takes just this step, and a report with every sample and loss.
    """
    run.skipped_steps += 1
    losses = [loss for part in run.world.gather([each.loss.item() for each in seen]) for loss in part]
    if run.skipped_steps <= run.config.train.max_skipped_steps:
        run.log.say(
            f"warning: step {step} is skipped, its gradient is not finite (losses of the micro-batches: {losses}); {run.skipped_steps} of "
            f"{run.config.train.max_skipped_steps} that train.max_skipped_steps allows"
        )
        return
    run.saver.finish()  # a checkpoint on its way is a good one
    folder = run.folder if run.folder.parent.name == FOLDER else _write_dump(run, step, seen)  # a dump that repeats the step
    raise UserError(
        f"at step {step} the gradient is not finite (losses of the micro-batches: {losses}), finite numbers needed, and "
        f"train.max_skipped_steps is {run.config.train.max_skipped_steps}: {folder / REPORT} names the samples, and python -m pipeline.train --config "
        f"{folder / 'config.yaml'} repeats the step; lower optim.lr, raise optim.warmup_epochs, set optim.clip_grad_norm or raise "
        f"train.max_skipped_steps."
    )


def _write_dump(run: Run, step: int, seen: list[MicroBatch]) -> Path:
    folder = run.folder / FOLDER / f"step-{step:08d}"
    rows = run.world.gather([_describe(run, number, each) for number, each in enumerate(seen)])
    saver = Saver(folder, run.world, run.config.checkpoint, Agreement())  # its own: the run's counts the run's saves
    train = run.config.train.model_copy(update={"max_steps": step})
    config = run.config.model_copy(update={"output_dir": str(folder), "train": train})
    before = dataclasses.replace(run.state(), skipped_steps=run.skipped_steps - 1)
    saver.save(run.engine, run.ema, before)
    saver.finish()
    if run.world.is_main:
        report = {
            "step": step,
            "world_size": run.world.size,
            "data": str(run.train_set.folder),
            "micro_batches": [row for part in rows for row in part],
        }
        replace_text(folder / REPORT, json.dumps(report, indent=1) + "\n")
        replace_text(folder / "config.yaml", config_to_yaml(config))
    run.world.barrier()
    return folder


def _describe(run: Run, number: int, micro_batch: MicroBatch) -> dict:
    request = micro_batch.request
    return {
        "rank": run.world.rank,
        "micro_batch": number,
        "loss": repr(micro_batch.loss.item()),  # JSON has no nan
        "keys": [run.train_set.key(sample) for sample in request.index.tolist()],
        "labels": request.label.tolist(),
        "epoch": request.epoch.tolist(),
        "position": request.position.tolist(),
    }
