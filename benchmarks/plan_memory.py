"""The plan's memory against real training steps: predicted and measured peak, side by side.

  python benchmarks/plan_memory.py                       # the whole table: about half an hour on two cores
  python benchmarks/plan_memory.py --models pervit_t --image-size 224 --worlds 1 --batches 4
  python benchmarks/plan_memory.py --worlds 4 --json FILE

Measured: real processes (gloo) with the real model, DeepSpeed engine and optimizer take three steps on random images, and
PyTorch's profiler reports every allocation of PyTorch's CPU allocator, those within operators too. The peak is that of the fullest
rank from the first step on. Nothing of it knows the plan, which counts the tensors of a trace without values.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

STEPS = 2  # the second has the optimizer's state, and what ZeRO-3 has learned to gather ahead
MIB = 2**20


def case_of(args: argparse.Namespace, name: str, checkpointing: bool, batch: int, stage: int, world: int) -> dict[str, Any]:
    """One row: the overrides of a config, and what the table says of it."""
    overrides = [
        f"model.name={name}",
        f"model.image_size={args.image_size}",
        f"train.activation_checkpointing={str(checkpointing).lower()}",
        f"train.micro_batch_size={batch}",
        f"train.global_batch_size={batch * world * args.accumulation}",
        f"train.zero_stage={stage}",
        f"train.precision={args.precision}",
        f"optim.name={args.optim}",
        "augment.mixup=0",  # whose groups of images would have to divide the micro-batch
        "augment.cutmix=0",
        *args.overrides,
    ]
    return {
        "model": name,
        "image_size": args.image_size,
        "checkpointing": checkpointing,
        "batch": batch,
        "stage": stage,
        "world": world,
        "precision": args.precision,
        "accumulation": args.accumulation,
        "overrides": overrides,
    }


def measure(overrides: list[str], world: Any) -> int:
    """Bytes of this rank at the peak of ``STEPS`` real steps. Collective."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from pipeline.config import load_config
    from pipeline.optim.batchnorm import StepStatistics
    from pipeline.optim.ema import WeightAverage
    from pipeline.optim.engine import build_engine, micro_batches, optimizer_step
    from pipeline.run.loss import spread_nonfinite, training_loss
    from pipeline.run.start import build_model

    config = load_config("pervit_t", overrides)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        engine = build_engine(build_model(config, world, [], fresh=False), config, world)
        average = WeightAverage(engine, config.train.ema_decay) if config.train.ema_decay else None
        statistics = StepStatistics(engine.module, world)
        engine.train()
        began = time.time_ns()
        for _ in range(STEPS):
            statistics.begin()
            for number in micro_batches(engine):
                statistics.micro_batch(number)
                batch = _batch(config)
                noise = torch.rand(len(batch.images), engine.module.noise_per_sample)
                loss = training_loss(engine(batch.images, noise), batch, config.train)
                engine.backward(spread_nonfinite(loss))
                optimizer_step(engine)
                del loss
            statistics.end(True)
            if average:
                average.update()
    peak = peak_of(profiler, began)
    if engine.zero_optimization_stage():
        engine.optimizer.destroy()
    engine.destroy()
    del engine, average, statistics, profiler, batch, noise
    gc.collect()
    return peak


def _batch(config: Any) -> Any:
    import torch

    size, side = config.train.micro_batch, config.model.image_size
    labels = torch.randint(config.model.num_classes, (size,))
    return SimpleNamespace(
        images=torch.randn(size, 3, side, side), labels=labels, other_labels=labels.clone(), weight=torch.rand(size)
    )


def peak_of(profiler: Any, began: int) -> int:
    """The most bytes of PyTorch's allocator that were in use since ``began`` (ns of the clock of the day), of those that were
    given out since the profiler's start.
    """
    reports, events = [], list(profiler.profiler.kineto_results.experimental_event_tree())
    while events:
        event = events.pop()
        events += event.children
        if event.tag.name == "Allocation":
            reports.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    held: dict[int, int] = {}  # by address: what was there before the start is not among them when it is freed
    used = peak = 0
    for at, address, size in sorted(reports, key=lambda report: report[0]):
        if size > 0:
            held[address] = size
            used += size
        else:
            used -= held.pop(address, 0)
        if at >= began:
            peak = max(peak, used)
    return peak


def run_rank(cases: list[dict[str, Any]], out: Path) -> None:
    """Measure all cases of one world size; rank 0 appends a line for each to a file."""
    import torch

    from pipeline.distributed.world import disconnect, init_world

    world = init_world()
    torch.set_num_threads(1)
    for case in cases:
        peaks = world.gather(measure(case["overrides"], world))
        if world.is_main:
            with out.open("a") as file:
                file.write(json.dumps({**case, "measured": max(peaks)}) + "\n")
    disconnect()


def measured(cases: list[dict[str, Any]], world: int, out: Path) -> None:
    """Start ``world`` processes that measure the cases."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    secret = secrets.token_hex(32)
    place = {
        "PERVIT_JOB_SECRET": secret,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", json.dumps(cases), "--json", str(out)],
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(world)
    ]
    if any([rank.wait() for rank in ranks]):
        sys.exit("a rank failed")


def predicted(case: dict[str, Any]) -> dict[str, int]:
    """Bytes by part that the plan says, without the loader, which the measured steps do not have."""
    from pipeline.config import load_config
    from pipeline.planning.memory import LOADER, plan_memory
    from pipeline.planning.subject import Subject

    parts = plan_memory(Subject(load_config("pervit_t", case["overrides"]), 1, case["world"], None)).parts
    return {name: size for name, size in parts.items() if name != LOADER}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown, the largest error last."""
    lines = [
        "| model | px | precision | checkpointing | micro-batch x accumulation | ZeRO | processes | predicted MiB | measured MiB | error |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        error = row["predicted"] / row["measured"] - 1
        lines.append(
            f"| {row['model']} | {row['image_size']} | {row['precision']} | {'on' if row['checkpointing'] else 'off'} | "
            f"{row['batch']} x {row['accumulation']} | {row['stage']} | {row['world']} | {row['predicted'] / MIB:.1f} | "
            f"{row['measured'] / MIB:.1f} | {error:+.1%} |"
        )
    errors = sorted(abs(row["predicted"] / row["measured"] - 1) for row in rows)
    return "\n".join([*lines, "", f"{len(rows)} rows; median error {errors[len(errors) // 2]:.1%}, largest {errors[-1]:.1%}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["pervit_t", "pervit_s", "pervit_m"])
    parser.add_argument("--image-size", type=int, default=112)
    parser.add_argument("--worlds", nargs="+", type=int, default=[1, 2, 4], help="numbers of processes")
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 1, 2, 3], help="of ZeRO, with several processes")
    parser.add_argument("--batches", nargs="+", type=int, default=[4, 12], help="images per forward pass and process")
    parser.add_argument("--checkpointing", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--optim", default="adamw")
    parser.add_argument("--json", type=Path, default=Path("plan_memory.jsonl"), help="rows, one a line; appended")
    parser.add_argument("--table", type=Path, help="also write the rows with what was predicted to this file, one a line")
    parser.add_argument("--report", action="store_true", help="measure nothing: the table of the rows that the file has")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args()
    if args.rank:
        run_rank(json.loads(args.rank), args.json)
        return
    if args.report:
        report(args.json, 0, args.table)
        return
    start = len(args.json.read_text().splitlines()) if args.json.exists() else 0
    for world in args.worlds:
        stages = args.stages if world > 1 else [0]
        chosen = itertools.product(args.models, args.checkpointing, args.batches, stages)
        measured([case_of(args, name, bool(ck), batch, stage, world) for name, ck, batch, stage in chosen], world, args.json)
    report(args.json, start, args.table)


def report(file: Path, start: int, out: Path | None) -> None:
    """Predict each row of a file from one on, and print the table."""
    rows = [json.loads(line) for line in file.read_text().splitlines()[start:]]
    for row in rows:
        row["parts"] = predicted(row)
        row["predicted"] = sum(row["parts"].values())
    print(table(rows))
    if out:
        out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
