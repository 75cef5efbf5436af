"""Whether the loader keeps up: a training step on loaded images against the same step on a batch in memory.

    python benchmarks/training_step.py --shards DIR [--config configs/pervit_t.yaml] [--batch 128] [--rounds 7]

Uses the GPU if there is one. Medians of interleaved rounds. On a GPU the loader alone is measured too, decoding on the GPU and
on the CPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from pipeline.command_line import run_command
from pipeline.config import Config, load_config
from pipeline.data.loader import Batch, Loader
from pipeline.data.plan import TrainPlan
from pipeline.data.shards import ShardSet
from pipeline.models import create_model
from pipeline.run.loss import mixed_cross_entropy
from pipeline.run.noise import sample_noise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", required=True, help="a shard set with a train split")
    parser.add_argument("--config", type=Path, default=Path("configs/pervit_t.yaml"), help="recipe and model")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=4, help="steps per round, of each kind")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of the loader")
    args = parser.parse_args()
    batch = args.batch
    config = load_config(args.config, [f"train.global_batch_size={batch}", f"train.micro_batch_size={batch}"])
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    shards = ShardSet(args.shards, "train")
    loader = build_loader(shards, config, device, args.threads)
    fixed, step = next(loader), build_step(config, len(shards.classes), device)

    seconds: dict[str, list[float]] = {"synthetic": [], "real": []}
    waiting = []
    for round_ in range(args.rounds + 1):  # the first is a warm-up
        synthetic, _ = timed(lambda: fixed, step, args.steps, device)
        real, waited = timed(lambda: next(loader), step, args.steps, device)
        if round_:
            seconds["synthetic"].append(synthetic)
            seconds["real"].append(real)
            waiting.append(waited / real)
    synthetic, real = (statistics.median(values) / args.steps for values in seconds.values())
    print(
        f"{config.model.name}, batch {batch}, {device}: step on synthetic data {1e3 * synthetic:.1f} ms, on real data {1e3 * real:.1f} ms"
    )
    print(f"ratio {real / synthetic:.3f}; waiting for data {statistics.median(waiting):.1%} of the time")
    if device.type == "cuda":
        rates = {kind: [] for kind in ("cuda", "cpu")}
        loaders = {kind: build_loader(shards, config, torch.device(kind, 0), args.threads) for kind in rates}
        for round_ in range(args.rounds + 1):
            for kind, each in loaders.items():
                taken, _ = timed(lambda each=each: next(each), lambda batch: None, 4 * args.steps, device)
                rates[kind] += [4 * args.steps * batch / taken] if round_ else []
        on_gpu, on_cpu = (statistics.median(values) for values in rates.values())
        print(
            f"loader alone: decoding on the GPU {on_gpu:.0f}, on {args.threads} CPU threads {on_cpu:.0f} images/s, ratio {on_gpu / on_cpu:.2f}"
        )


def build_loader(shards: ShardSet, config: Config, device: torch.device, threads: int) -> Loader:
    """The recipe's batches in one process."""
    size, batch = config.model.image_size, config.train.micro_batch_size
    plan = TrainPlan(
        shards=shards,
        seed=config.seed,
        image_size=size,
        global_batch_size=batch,
        batch_size=batch,
        rank=0,
        world_size=1,
        data=config.data,
        augment=config.augment,
    )
    return Loader(plan, config.data, torch.device("cpu") if device.type == "cpu" else device, threads)


def build_step(config: Config, classes: int, device: torch.device) -> Callable[[Batch], None]:
    """Forward, loss, backward, AdamW: the work of one rank between two batches."""
    model = create_model(config.model.name, classes, config.model.image_size, config.model.drop_path).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(batch: Batch) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=config.train.precision == "bf16"):
            scores = model(batch.images, sample_noise(model, batch, config.seed))
        mixed_cross_entropy(scores, batch, config.train.label_smoothing).backward()
        optimizer.step()
        optimizer.zero_grad()

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


if __name__ == "__main__":
    run_command(main)
