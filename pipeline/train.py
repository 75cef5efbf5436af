"""Train a model.

    python -m pipeline.train --config configs/pervit_t.yaml [dotted.key=value ...]

The same command continues a run that was stopped, on any number of processes. Several processes: ``launch/local.sh`` on one
machine, ``sbatch launch/train.slurm configs/pervit_t.yaml`` on a cluster. SIGTERM, SIGUSR1 or SIGHUP to any of them: all save what
they have trained and end with exit code 75.
"""

from __future__ import annotations

if __name__ == "__main__":
    # Before the imports below, which take seconds: --help, what is wrong with the config, the first line.
    from pipeline.cli import train_command

    train_command()

import math
import time

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.config import Config, accumulation_steps
from pipeline.data.loader import Batch, to_device
from pipeline.distillation import hard_distillation_loss
from pipeline.distributed import World, disconnect, init_world
from pipeline.engine import optimizer_step, set_learning_rate
from pipeline.errors import PREEMPTED
from pipeline.evaluation import evaluate
from pipeline.faults.heartbeat import Heartbeat
from pipeline.faults.nonfinite import MicroBatch, skip_or_stop
from pipeline.faults.stop_signal import StopSignal
from pipeline.logs import console, pictures
from pipeline.logs.run_log import StepRecord
from pipeline.optim import learning_rate
from pipeline.philox import Stream, uniforms
from pipeline.run import Run, build_model, patience, start_run

_STOPPED_EARLY = "stopped by a signal before the first step of this start: nothing new to save; the same command begins where this one would have"
_BELOW_ONE = np.float32(1 - 2.0**-24)  # the largest float32 in [0, 1)


def connect_and_train(config: Config, stop: StopSignal) -> int:
    """Connect the processes and :func:`train`; what ``python -m pipeline.train`` does once it knows the config."""
    world = init_world(patience(config))
    code = train(config, world, stop)
    disconnect()
    return code


def train(config: Config, world: World, stop: StopSignal | None = None) -> int:
    """Train to the end of the schedule, from the newest whole checkpoint if there is one.

    Args:
        config: the run.
        world: all processes; each calls this.
        stop: where a wish to end the run shows.

    Returns:
        The exit code: 0 at the end of the schedule, ``PREEMPTED`` after a signal, with a checkpoint if a step was taken.

    Raises:
        UserError: config, data and run folder do not fit together, a gradient is not finite, or nothing can be written.
    """
    stop = stop or StopSignal()
    # What all processes see, so that nobody needs to hear it from another: the batch's arithmetic, the model's switches and size.
    accumulation_steps(config.train, world.size, config.augment.unit)
    with torch.device("meta"):  # costs no memory
        build_model(config, world, [], fresh=False)
    with Heartbeat(world, config.distributed) as heartbeat:
        if any(world.gather(stop.received)):  # it came while the libraries were loading: what would be built is of no use
            if world.is_main:
                console.say(_STOPPED_EARLY)
            return PREEMPTED
        run = start_run(config, world, stop, heartbeat)
        if run is None:
            return 0
        with run:
            stopping = stopped_early = run.agreement.ask(stop.received != 0)  # it came while the run was built
            if run.evaluation_due and not stopping:
                stopping = complete_step(run, stopping=False)
            while run.step < run.schedule.last_step and not stopping:
                batch = training_step(run)
                agreed = run.tell()
                run.evaluation_due = run.schedule.passes(run.step, config.eval.every_epochs)
                if run.step == run.first_step + 1:
                    grid = pictures.image_grid(batch, run.train_set.classes, config.data.mean, config.data.std)
                    run.log.image(pictures.IMAGES, grid, run.step)
                stopping = complete_step(run, agreed.stop != 0 and run.step < run.schedule.last_step)
            run.saver.finish()
            if stopped_early:
                run.log.say(_STOPPED_EARLY)
            elif stopping:
                run.log.say(f"stopped by a signal at step {run.step}: the same command goes on from here")
            else:
                run.log.say(
                    f"done at step {run.step}; curves, beside those of other runs: tensorboard --logdir {run.folder.parent}"
                )
    return PREEMPTED if stopping else 0


def training_step(run: Run) -> Batch:
    """One optimizer step; returns its last micro-batch."""
    config, engine, schedule, step = run.config, run.engine, run.schedule, run.step + 1  # its number, once it is done
    lr = learning_rate(run.step, schedule.steps_per_epoch, schedule.epochs, config.train.global_batch_size, config.optim)
    set_learning_rate(engine, lr)
    run.norms.begin()
    data_seconds, replaced, seen = 0.0, 0, []
    for number in range(engine.gradient_accumulation_steps()):
        run.heartbeat.at(step, "reading data")
        started = time.perf_counter()
        batch = next(run.loader)
        data_seconds += time.perf_counter() - started
        replaced += batch.replaced
        run.heartbeat.at(step, "training")
        run.norms.micro_batch(number)
        scores = engine(batch.images, sample_noise(engine.module, batch, config.seed))
        loss = mixed_cross_entropy(scores, batch, config.train.label_smoothing)
        if run.teacher:
            loss = hard_distillation_loss(loss, scores, run.teacher(batch.images))
        engine.backward(spread_nonfinite(loss))
        grad_norm = optimizer_step(engine)
        seen.append(MicroBatch(batch.request, loss.detach()))
    taken = math.isfinite(grad_norm)  # the same on all processes
    run.norms.end(taken)
    if not taken:
        skip_or_stop(run, step, seen)
    elif run.ema:
        run.ema.update()
    run.step = step
    loss_mean = torch.stack([each.loss for each in seen]).mean()
    where = (step, schedule.epoch(step), schedule.samples(step))
    bad = run.loader.bad.take_unreported()
    run.log.step(StepRecord(*where, lr, loss_mean, grad_norm, data_seconds, replaced, bad, run.skipped_steps))
    if run.samples and taken:
        for each in seen:
            run.samples.add(each.request)
        run.samples.write(step)
    return batch


def complete_step(run: Run, stopping: bool) -> bool:
    """What follows a step: an evaluation and a checkpoint, where they are due.

    Args:
        stopping: the processes have agreed to end here: an evaluation that is due is left to the next start.

    Returns:
        Whether the run ends here.
    """
    every, improved = run.config.checkpoint.every_steps, False
    made_up_for = run.evaluation_due and run.step == run.first_step  # its checkpoint still says that it is due
    if run.evaluation_due and not stopping:
        run.heartbeat.at(run.step, "evaluating")
        run.log.flush()
        results = evaluate_run(run)
        if results:
            improved = note_results(run, results)
            run.evaluation_due = False
        run.engine.train()
        stopping = results is None
    if stopping or improved or made_up_for or run.step == run.schedule.last_step or (every and run.step % every == 0):
        run.heartbeat.at(run.step, "saving")
        run.log.flush(to_disk=True)  # the rows that lead to a checkpoint are there when it is
        run.saver.save(run.engine, run.ema, run.state())
        run.log.restart_clock()
    return stopping


def evaluate_run(run: Run) -> dict[str, dict[str, float]] | None:
    """Results of the current weights, and of their average if there is one; None if a signal came in between.

    Leaves the engine in eval mode.
    """

    def stopped() -> bool:
        run.heartbeat.at(run.step, "evaluating")
        return run.tell().stop != 0

    run.engine.eval()
    results = {"model": evaluate(run.engine, run.val_loader, run.world, stopped)}
    if run.ema and results["model"]:
        with run.ema.applied():
            results["ema"] = evaluate(run.engine, run.val_loader, run.world, stopped)
    return results if all(results.values()) else None


def note_results(run: Run, results: dict[str, dict[str, float]]) -> bool:
    """Log an evaluation.

    Returns:
        Whether the run has never been better, so that its checkpoint is to be kept.
    """
    where = (run.step, run.schedule.epoch(run.step), run.schedule.samples(run.step))
    run.log.evaluation(*where, results)
    for weights, result in results.items():
        if "nonfinite" in result:
            run.log.say(f"warning: {weights} scores of {result['nonfinite']} images are not finite: these count as wrong")
    phi = pictures.peripheral_maps(run.engine.module, run.config.model.image_size)
    if phi is not None:
        run.log.image(pictures.PHI, pictures.map_grid(phi), run.step)
    weights, result = max(results.items(), key=lambda item: item[1]["top1"])
    if run.best and result["top1"] <= run.best["top1"]:
        return False
    run.best = {"top1": result["top1"], "step": run.step, "weights": weights}
    return run.config.checkpoint.keep_best


def mixed_cross_entropy(scores: Tensor, batch: Batch, label_smoothing: float) -> Tensor:
    """Mean cross entropy of images that are mixtures of two labels.

    Cross entropy is linear in the target, so mixing two losses is what mixing the two smoothed one-hot vectors is
    (Mixup's equation for the target).

    Args:
        scores: (B, classes), any floating type.
        batch: with ``labels``, ``other_labels`` and ``weight``.
        label_smoothing: share of each target spread over all classes.
    """
    own, other = (
        F.cross_entropy(scores.float(), labels, label_smoothing=label_smoothing, reduction="none")  # (B,)
        for labels in (batch.labels, batch.other_labels)
    )
    return (batch.weight * own + (1 - batch.weight) * other).mean()


def spread_nonfinite(loss: Tensor) -> Tensor:
    """The loss itself; if it is not finite then its gradient is not either, which all processes notice and none has to ask for."""
    return loss * torch.where(loss.isfinite(), 1.0, torch.nan)


def sample_noise(model: nn.Module, batch: Batch, seed: int) -> Tensor | None:
    """The uniform numbers that the model may draw for each image (stochastic depth), a function of its place in the stream.

    Returns:
        (B, noise_per_sample) float32 on the batch's device, or None when the model draws none.
    """
    count = model.noise_per_sample
    if count == 0:
        return None
    noise = uniforms(Stream.STOCHASTIC_DEPTH, seed, batch.request.epoch, batch.request.position, count).astype(np.float32)
    noise = np.minimum(noise, _BELOW_ONE)  # rounding must not make a 1 of it
    return to_device(noise, batch.images.device)
