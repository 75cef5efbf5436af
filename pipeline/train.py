"""Train a model.

    python -m pipeline.train --config configs/pervit_t.yaml [dotted.key=value ...]

The same command continues a run that was stopped. Several processes: ``launch/local.sh`` on one machine,
``sbatch launch/pervit_t.slurm`` on a cluster.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline import checkpoint, flops, pictures
from pipeline.batchnorm import averaged_statistics
from pipeline.config import Config, accumulation_steps, load_config
from pipeline.data.loader import Batch, Loader, to_device
from pipeline.data.plan import TrainPlan, epoch_length
from pipeline.data.shards import ShardSet
from pipeline.distillation import hard_distillation_loss, load_teacher
from pipeline.distributed import World, disconnect, init_world
from pipeline.ema import WeightAverage
from pipeline.engine import build_engine, optimizer_step, set_learning_rate
from pipeline.errors import run_command
from pipeline.evaluate import check_classes, check_same_classes, evaluate, evaluation_loader
from pipeline.models import create_model, load_pretrained
from pipeline.optim import learning_rate
from pipeline.philox import Stream, uniforms
from pipeline.run_folder import check_same_run
from pipeline.run_log import RunLog, StepRecord, write_run_files

_BELOW_ONE = np.float32(1 - 2.0**-24)  # the largest float32 in [0, 1)


@dataclass(frozen=True)
class Schedule:
    """Where the run stands at a step. Epochs follow each other without a gap, so their ends need not fall on a step."""

    images: int  # that an epoch shows
    global_batch_size: int
    epochs: float
    max_steps: int | None

    @property
    def steps_per_epoch(self) -> float:
        return self.images / self.global_batch_size

    @property
    def last_step(self) -> int:
        """Of the schedule, or ``max_steps`` if that comes first."""
        whole = math.ceil(self.epochs * self.steps_per_epoch - 1e-9)
        return whole if self.max_steps is None else min(whole, self.max_steps)

    def samples(self, step: int) -> int:
        return step * self.global_batch_size

    def epoch(self, step: int) -> float:
        return self.samples(step) / self.images

    def passes(self, step: int, every_epochs: float | None) -> bool:
        """Whether this step completes another ``every_epochs`` epochs, or the run."""
        if step == self.last_step:
            return True
        if every_epochs is None:
            return False
        every_samples = Fraction(str(every_epochs)) * self.images  # exact: 0.3 // 0.1 is 2 in floating point
        return self.samples(step) // every_samples > self.samples(step - 1) // every_samples


def make_schedule(config: Config, train_set: ShardSet) -> Schedule:
    """The run's schedule; with ``train.scale_epochs`` the epochs of a subset are as many steps as those of the full set."""
    images = epoch_length(len(train_set), config.augment.repeats)
    epochs = config.train.epochs
    if config.train.scale_epochs:
        epochs /= train_set.subset
    return Schedule(images, config.train.global_batch_size, epochs, config.train.max_steps)


def train(config: Config, world: World) -> None:
    """Train to the end of the schedule, from the newest checkpoint if there is one.

    Args:
        config: the run.
        world: all processes; each calls this.

    Raises:
        UserError: config, data and run folder do not fit together, or the loss is not finite.
    """
    train_set, val_set = ShardSet(config.data.path, "train"), ShardSet(config.data.path, "val")
    check_classes(config, train_set)
    check_same_classes(val_set, train_set.classes, of=str(train_set.folder))
    accumulation = accumulation_steps(config.train, world.size)
    schedule = make_schedule(config, train_set)
    run_dir = check_same_run(config, world)
    first_step = world.gather(checkpoint.latest_step(run_dir) or 0)[0]  # rank 0's word: network disks may lag elsewhere
    if first_step >= schedule.last_step:
        if world.is_main:
            print(f"{run_dir} is complete at step {first_step}: nothing to train.", flush=True)
        return

    count = (config.model.name, config.model.image_size, config.model.num_classes, config.model.switches)
    cost = world.gather(flops.count(*count) if world.is_main else None)[0]  # before ZeRO-3 patches F.linear
    torch.manual_seed(config.seed)
    model = create_model(
        config.model.name,
        config.model.num_classes,
        config.model.image_size,
        config.model.drop_path,
        config.train.activation_checkpointing,
        config.model.switches,
    )
    if config.train.init_from and not first_step:
        source = Path(config.train.init_from)
        for sentence in load_pretrained(model, checkpoint.read_initial_weights(source), source=f"train.init_from {source}"):
            if world.is_main:
                print(f"init_from: {sentence}", flush=True)
    teacher = load_teacher(config, world.device) if config.train.teacher else None
    engine = build_engine(model, config, world)
    ema = WeightAverage(engine, config.train.ema_decay) if config.train.ema_decay else None
    about = {
        "config": config.model_dump(mode="json"),
        "classes": train_set.classes,
        "data": train_set.identity(),
        "world_size": world.size,
    }
    if first_step:
        checkpoint.load(engine, run_dir, first_step, about["data"], ema, world)

    write_run_files(config, world)  # only now: a start that was refused leaves no trace
    loader = training_loader(train_set, config, world, first_step)
    val_loader = evaluation_loader(val_set, config, world)
    log = RunLog(config, world, first_step, schedule.last_step, cost.training_flops_per_image(config.train.micro_batch_size))
    if config.optim.warmup_epochs >= schedule.epochs:
        log.say(
            f"note: optim.warmup_epochs {config.optim.warmup_epochs:g} >= train.epochs {schedule.epochs:g}: the run ends within the warm-up"
        )
    log.say(
        f"{config.model.name} on {world.device}: {cost.params:,} parameters, {cost.gmacs:.3f} GMACs per image; batch {config.train.global_batch_size} = "
        f"{config.train.micro_batch_size} x {world.size} processes x {accumulation}; steps {first_step} to {schedule.last_step}, "
        f"{schedule.steps_per_epoch:.1f} per epoch"
    )

    for step in range(first_step + 1, schedule.last_step + 1):  # step: its number, once it is done
        lr = learning_rate(step - 1, schedule.steps_per_epoch, schedule.epochs, config.train.global_batch_size, config.optim)
        set_learning_rate(engine, lr)
        loss_sum, data_seconds, replaced = torch.zeros((), device=world.device), 0.0, 0
        for _ in range(accumulation):
            started = time.perf_counter()
            batch = next(loader)
            data_seconds += time.perf_counter() - started
            replaced += batch.replaced
            scores = engine(batch.images, sample_noise(engine.module, batch, config.seed))
            loss = mixed_cross_entropy(scores, batch, config.train.label_smoothing)
            if teacher:
                loss = hard_distillation_loss(loss, scores, teacher(batch.images))
            engine.backward(loss)
            grad_norm = optimizer_step(engine)
            loss_sum += loss.detach()
        if ema:
            ema.update()
        loss_mean = loss_sum / accumulation
        where = (step, schedule.epoch(step), schedule.samples(step))
        log.step(StepRecord(*where, lr, loss_mean, grad_norm, data_seconds, replaced, loader.bad.take_unreported()))

        if step == first_step + 1:
            log.images("train/images", pictures.image_grid(batch.images, config.data.mean, config.data.std), step)
        if schedule.passes(step, config.eval.every_epochs):
            log.flush()
            results = evaluate_engine(engine, val_loader, ema, world)
            log.evaluation(step, schedule.epoch(step), schedule.samples(step), results)
            phi = pictures.peripheral_maps(engine.module, batch.images)
            if phi is not None:
                log.images("model/peripheral_attention", phi, step)
            engine.train()
        if step == schedule.last_step or (config.checkpoint.every_steps and step % config.checkpoint.every_steps == 0):
            log.flush()
            checkpoint.save(engine, run_dir, step, about, ema, world, config.checkpoint.keep_last)
            log.restart_clock()
    for each in (loader, val_loader):
        each.close()
    log.close()


def training_loader(shards: ShardSet, config: Config, world: World, first_step: int) -> Loader:
    """This process's micro-batches from the first one of step ``first_step`` on."""
    plan = TrainPlan(
        shards=shards,
        seed=config.seed,
        image_size=config.model.image_size,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        rank=world.rank,
        world_size=world.size,
        data=config.data,
        augment=config.augment,
    )
    return Loader(plan, config.data, world.device, world.cpu_threads, start=first_step * plan.batches_per_step)


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


def evaluate_engine(engine, loader: Loader, ema: WeightAverage | None, world: World) -> dict[str, dict[str, float]]:
    """Results of the current weights, and of their average if there is one. Leaves the engine in eval mode."""
    engine.eval()
    with averaged_statistics(engine.module, world):
        results = {"model": evaluate(engine, loader, world)}
        if ema:
            with ema.applied():
                results["ema"] = evaluate(engine, loader, world)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, type=Path, help="a file of configs/")
    parser.add_argument("overrides", nargs="*", metavar="dotted.key=value", help="for example train.epochs=100")
    args = parser.parse_args()
    config = load_config(args.config, args.overrides)
    world = init_world()
    train(config, world)
    disconnect()


if __name__ == "__main__":
    run_command(main)
