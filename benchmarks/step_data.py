"""How long a training step waits for its images: steps on loaded batches against the same steps on a batch in memory."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.step_forms import Setting
from pipeline.cluster.world import World
from pipeline.config import Config
from pipeline.loader.batches import TrainBatches
from pipeline.loader.loader import Batch, Loader
from pipeline.optim.engine import build_engine, optimizer_step
from pipeline.shards.shard_set import ShardSet
from pipeline.step.loss import Objective, label_loss
from pipeline.step.train_step import forward_backward, sample_noise

_STEPS = 4  # of each kind in a round


def data_report(config: Config, shards: str, device: torch.device, rounds: int) -> str:
    """Lines: a step on real against one on synthetic data, the share of time that it waits; on a GPU the loader alone too."""
    train_set, threads = ShardSet(shards, "train"), len(os.sched_getaffinity(0))
    loader = build_loader(train_set, config, device, threads)
    fixed, step = next(loader), build_step(config, len(train_set.classes), device)
    seconds: dict[str, list[float]] = {"synthetic": [], "real": []}
    waiting = []
    for round_ in range(rounds + 1):  # the first is a warm-up
        synthetic, _ = timed(lambda: fixed, step, _STEPS, device)
        real, waited = timed(lambda: next(loader), step, _STEPS, device)
        if round_:
            seconds["synthetic"].append(synthetic)
            seconds["real"].append(real)
            waiting.append(waited / real)
    synthetic, real = (statistics.median(values) / _STEPS for values in seconds.values())
    lines = [
        f"{config.model.name}, {config.train.precision}: step on a batch in memory {1e3 * synthetic:.1f} ms, on loaded batches "
        f"{1e3 * real:.1f} ms, ratio {real / synthetic:.3f}; waiting for data {statistics.median(waiting):.1%} of the time"
    ]
    if device.type == "cuda":
        rates: dict[str, list[float]] = {kind: [] for kind in ("cuda", "cpu")}
        loaders = {kind: build_loader(train_set, config, torch.device(kind, 0), threads) for kind in rates}
        images = 4 * _STEPS * config.train.micro_batch_size
        for round_ in range(rounds + 1):
            for kind, each in loaders.items():
                taken, _ = timed(lambda each=each: next(each), lambda batch: None, 4 * _STEPS, device)
                rates[kind] += [images / taken] if round_ else []
        on_gpu, on_cpu = (statistics.median(values) for values in rates.values())
        lines.append(
            f"loader alone: decoding on the GPU {on_gpu:.0f}, on {threads} CPU threads {on_cpu:.0f} images/s, ratio {on_gpu / on_cpu:.2f}"
        )
    return "\n".join(lines)


def build_loader(shards: ShardSet, config: Config, device: torch.device, threads: int) -> Loader:
    """The recipe's batches in one process."""
    batches = TrainBatches.for_one_process(shards, config, config.train.micro_batch_size)
    return Loader(batches, config.data, torch.device("cpu") if device.type == "cpu" else device, threads)


def build_step(config: Config, classes: int, device: torch.device) -> Callable[[Batch], None]:
    """Forward, loss, backward and optimizer through the engine: the work of one rank between two batches."""
    world = World(0, 1, device, torch.get_num_threads())
    engine = build_engine(Setting(config, classes, world).model(), config, world)
    objective = Objective(label_loss(config.train))

    def step(batch: Batch) -> None:
        forward_backward(engine, engine.backward, batch, sample_noise(engine.module, batch, config.seed), objective)
        optimizer_step(engine)

    return step


def timed(get: Callable[[], Batch], step: Callable[[Batch], None], steps: int, device: torch.device) -> tuple[float, float]:
    """Seconds for some steps, and how many of them were spent waiting for batches."""
    waited, started = 0.0, time.perf_counter()
    for _ in range(steps):
        asked = time.perf_counter()
        batch = get()
        waited += time.perf_counter() - asked
        step(batch)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started, waited
