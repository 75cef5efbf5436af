"""The plan's memory against real training steps: predicted and measured peak, side by side.

  python benchmarks/plan_memory.py                       # the whole table: about half an hour on two cores
  python benchmarks/plan_memory.py --worlds 4 --json FILE

Measured: real processes (gloo) with the real model, DeepSpeed engine and optimizer take three steps on random images, and
PyTorch's profiler reports every allocation of PyTorch's CPU allocator, those within operators too. The peak is that of the fullest
rank from the first step on. Nothing of it knows the plan, which counts the tensors of a trace without values.
"""

from __future__ import annotations

import argparse
import bisect
import gc
import itertools
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

STEPS = 2  # the second has the optimizer's state, and what ZeRO-3 has learned to gather ahead
_AFTER = 1  # steps whose peak does not count: they take the addresses of what nobody was seen to free
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
        "optim": args.optim,
        "evaluation": args.evaluation,
        "others": args.overrides,
        "overrides": overrides,
    }


def measure(overrides: list[str], world: Any, evaluates: bool = False) -> int:
    """Bytes of this rank at the peak of ``STEPS`` real steps, and of an evaluation after them. Collective."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from pipeline.config import load_config
    from pipeline.inference.teacher import load_teacher
    from pipeline.optim.averages import StepStatistics, WeightAverage
    from pipeline.optim.engine import build_engine, micro_batches, optimizer_step
    from pipeline.step.loss import Objective, label_loss
    from pipeline.step.train_step import forward_backward
    from pipeline.training.building import build_model

    config = load_config("pervit_t", overrides)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        engine = build_engine(build_model(config, world, [], fresh=False), config, world)
        average = WeightAverage(engine, config.train.ema_decay) if config.train.ema_decay else None
        statistics = StepStatistics(engine.module, world)
        teacher = load_teacher(config, world.device) if config.train.teacher else None
        objective = Objective(label_loss(config.train), teacher)
        engine.train()
        began = ended = time.time_ns()
        for step in range(STEPS + _AFTER):
            if step == STEPS:
                if evaluates:
                    _evaluate(engine, average, config)
                ended = time.time_ns()
            statistics.begin()
            for number in micro_batches(engine):
                statistics.micro_batch(number)
                batch = _batch(config)
                noise = torch.rand(len(batch.images), engine.module.noise_per_sample)
                forward_backward(engine, engine.backward, batch, noise, objective)
                optimizer_step(engine)
            statistics.end(True)
            if average:
                average.update(taken=True)
    peak = peak_of(profiler, began, ended)
    if engine.zero_optimization_stage():
        engine.optimizer.destroy()
        engine.destroy()
    del engine, average, statistics, profiler, batch, noise, teacher, objective
    gc.collect()
    return peak


def _evaluate(engine: Any, average: Any, config: Any) -> None:
    """As ``pipeline.train`` does: the model, then its average."""
    import torch

    shape = (config.eval.batch_size, 3, config.model.image_size, config.model.image_size)
    engine.eval()
    for weights in (nullcontext(), average.applied()) if average else (nullcontext(),):
        with weights, torch.no_grad():
            for _ in range(2):
                engine(torch.randn(shape)).float()
    engine.train()


def _batch(config: Any) -> Any:
    import torch

    size, side = config.train.micro_batch, config.model.image_size
    labels = torch.randint(config.model.num_classes, (size,))
    return SimpleNamespace(
        images=torch.randn(size, 3, side, side), labels=labels, other_labels=labels.clone(), weight=torch.rand(size)
    )


def peak_of(profiler: Any, began: int, ended: int) -> int:
    """The most bytes of PyTorch's allocator that were in use between two times (ns of the clock of the day), of those that were given
    out since the profiler's start.

    Gloo's threads take part in a collective's buffers, and the profiler does not see what they free. It shows when the address is
    given out again: such a block counts up to the next allocation of the thread that made it, which waited for the collective.
    """
    reports, events = [], list(profiler.profiler.kineto_results.experimental_event_tree())
    while events:
        event = events.pop()
        events += event.children
        if event.tag.name == "Allocation":
            reports.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size, event.start_tid))
    reports.sort(key=lambda report: report[0])
    unseen = _freed_unseen(reports)
    held: dict[int, int] = {}  # by address: what was there before the start is not among them when it is freed
    waiting: dict[int, list[int]] = {}  # by thread: addresses whose release nobody saw
    used = peak = 0
    for number, (at, address, size, thread) in enumerate(reports):
        if size > 0:
            used -= sum(held.pop(gone, 0) for gone in waiting.pop(thread, []))
            held[address] = size
            used += size
            if number in unseen:
                waiting.setdefault(thread, []).append(address)
        else:
            used -= held.pop(address, 0)
        if began <= at < ended:
            peak = max(peak, used)
    return peak


def _freed_unseen(reports: list[tuple[int, int, int, int]]) -> set[int]:
    """Numbers of the allocations that a later one overlaps before they are freed."""
    unseen = set()
    starts: list[int] = []  # addresses that are held, in order
    held: dict[int, tuple[int, int]] = {}  # by address: size, number
    for number, (_, address, size, _) in enumerate(reports):
        if size < 0:
            if held.pop(address, None):
                starts.pop(bisect.bisect_left(starts, address))
            continue
        first = max(0, bisect.bisect_left(starts, address) - 1)
        last = bisect.bisect_left(starts, address + size)
        for start in starts[first:last]:
            if start + held[start][0] > address:
                unseen.add(held.pop(start)[1])
                starts.remove(start)
        held[address] = size, number
        bisect.insort(starts, address)
    return unseen


def run_rank(cases: list[dict[str, Any]], out: Path) -> None:
    """Measure all cases of one world size; rank 0 appends a line for each to a file."""
    import torch

    from pipeline.cluster.rendezvous import disconnect, init_world

    world = init_world()
    torch.set_num_threads(1)
    for case in cases:
        peaks = world.gather(measure(case["overrides"], world, case["evaluation"]))
        if world.is_main:
            with out.open("a") as file:
                file.write(json.dumps({**case, "measured": max(peaks)}) + "\n")
    disconnect()
    os._exit(0)  # threads that the profiler has seen may abort a process while its interpreter shuts down: all is written


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
    from pipeline.planning.memory import LOADER, Subject, plan_memory

    overrides = [*case["overrides"], *([] if case.get("evaluation") else ["eval.batch_size=1"])]  # not measured: not the peak
    parts = plan_memory(Subject(load_config("pervit_t", overrides), 1, case["world"], None)).parts
    return {name: size for name, size in parts.items() if name != LOADER}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown, the largest error last."""
    lines = [
        "| model | px | precision | checkpointing | micro-batch x accumulation | ZeRO | processes | besides | predicted MiB | measured MiB | error |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        error = row["predicted"] / row["measured"] - 1
        others = [name for name in (row.get("optim", "adamw"),) if name != "adamw"]
        others += ["evaluation"] * row.get("evaluation", False) + row.get("others", [])
        lines.append(
            f"| {row['model']} | {row['image_size']} | {row['precision']} | {'on' if row['checkpointing'] else 'off'} | "
            f"{row['batch']} x {row['accumulation']} | {row['stage']} | {row['world']} | {' '.join(others)} | {row['predicted'] / MIB:.1f} | "
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
    parser.add_argument("--evaluation", action="store_true", help="after the steps, of the average too if there is one")
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
