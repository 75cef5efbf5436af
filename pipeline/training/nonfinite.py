"""Skip and count a step with non-finite gradients, or stop the run and dump what reproduces it."""

import dataclasses
import json
from functools import partial
from pathlib import Path

from pipeline.checkpoint.saver import Saver
from pipeline.cluster.agreement import Agreement, do_in_main
from pipeline.config import config_to_yaml
from pipeline.errors import UserError, first_few
from pipeline.files import replace_text, write_error
from pipeline.step.train_step import StepResult
from pipeline.training.state import Run

FOLDER, REPORT = "nonfinite", "report.json"
_SHOWN = 8  # losses in a message; the report has all


def skip_or_stop(run: Run, step: int, result: StepResult) -> None:
    """Count a step that was skipped, or stop, with the run in the state before the step: none has changed the weights since.
    Collective. Raises UserError: more than ``train.max_skipped_steps``. ``nonfinite/step-...`` in the run folder is then a run
    folder itself: the state before the step, a config that repeats this step alone, a report of every sample and loss."""
    run.skipped_steps += 1
    losses = [loss for part in run.world.gather([loss.item() for loss in result.losses]) for loss in part]
    shown = first_few([f"{loss:.4g}" for loss in losses], _SHOWN)
    allowed = run.config.train.max_skipped_steps
    if run.skipped_steps <= allowed:
        said = f"step {step} is skipped, its gradient is not finite (losses of its micro-batches: {shown})"
        run.log.warn(f"{said}; {run.skipped_steps} of {allowed} that train.max_skipped_steps allows")
        return
    run.step = step - 1
    run.train_state.batchnorm.restore()  # the next step's passes may have begun
    what = f"at step {step} the gradient is not finite (losses of its micro-batches: {shown})"
    remedy = "lower optim.lr, raise optim.warmup_epochs, set optim.clip_grad_norm or raise train.max_skipped_steps"
    sentence = f"{what}, and train.max_skipped_steps is {allowed}: {remedy}"
    if (run.folder / REPORT).exists():  # this run repeats such a step
        raise UserError(f"{sentence}; {run.folder / REPORT} names the samples.")
    folder = run.folder / FOLDER / f"step-{step:08d}"
    try:
        run.saver.finish()  # a checkpoint in progress is from before this step
        _write_dump(run, step, folder, result)
    except UserError as error:
        raise UserError(f"{sentence}; what reproduces the step could not be written: {error}") from None
    again = f"pervit train --config {folder / 'config.yaml'} repeats the step"
    raise UserError(f"{sentence}; {folder / REPORT} names the samples, and {again}.")


def _write_dump(run: Run, step: int, folder: Path, result: StepResult) -> None:
    rows = [
        {
            "rank": run.world.rank,
            "micro_batch": number,
            "loss": repr(loss.item()),  # JSON has no NaN
            "keys": [run.train_set.key(sample) for sample in request.index.tolist()],
            "labels": request.label.tolist(),
            "epoch": request.epoch.tolist(),
            "position": request.position.tolist(),
        }
        for number, (request, loss) in enumerate(zip(result.requests, result.losses))
    ]
    of_ranks = run.world.gather(rows)
    report = {"step": step, "world_size": run.world.size, "data": str(run.train_set.folder)}
    report["micro_batches"] = [row for rows in of_ranks for row in rows]

    def write() -> None:
        config = run.config.with_values({"output_dir": str(folder), "train.max_steps": step})
        try:
            folder.mkdir(parents=True, exist_ok=True)
            replace_text(folder / REPORT, json.dumps(report, indent=1) + "\n")
            replace_text(folder / "config.yaml", config_to_yaml(config))
        except OSError as error:
            raise write_error(Path(error.filename or folder), error) from None

    do_in_main(write, run.world)
    agreement = Agreement(run.config.distributed.collective_timeout)  # a separate one: the run's counts the run's saves
    saver = Saver(folder, run.world, run.config.checkpoint, agreement, partial(run.heartbeat.still, "saving"))
    before = dataclasses.replace(run.state(), skipped_steps=run.skipped_steps - 1)
    saver.save(run.train_state.engine, run.train_state.ema, before)
    saver.finish()
