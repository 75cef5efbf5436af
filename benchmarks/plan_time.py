"""What ``pipeline.plan`` says of time against measurement.

    python -m benchmarks.plan_time [--models pervit_t,pervit_s,deit_t] [--batches 4,8] [--precisions fp32,bf16] [--rounds 3]
    python -m benchmarks.plan_time --published

A step on this machine's CPU, with and without activation checkpointing: the plan measures the machine for two seconds and counts the
rest; the measurement is a training step through DeepSpeed's engine. Both in CPU time of one thread, so that other users of the machine
matter little, in turns, the least of several rounds. ``--published`` compares plans for GPUs with step times that others have published
(``benchmarks/results/plan_time_published.csv``, whose plans and errors it writes again).
"""

from __future__ import annotations

import argparse
import csv
import gc
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.step_forms import Setting, ours
from pipeline.cluster.host import keep_freed_memory
from pipeline.cluster.rendezvous import disconnect, init_world
from pipeline.command_line import run_command
from pipeline.config import Config, load_config
from pipeline.errors import UserError
from pipeline.hardware import GPUS
from pipeline.planning import time as time_of_plan
from pipeline.planning.memory import Subject
from pipeline.planning.rates import GpuRates, measure_cpu
from pipeline.planning.time import OPTIMIZER, step_parts
from pipeline.planning.trace import fused
from pipeline.planning.traced_step import trace_evaluation, trace_step

_RECIPE = Path("configs/pervit_t.yaml")
PUBLISHED = Path(__file__).parent / "results/plan_time_published.csv"
_FP16_FLOPS = {"v100-32g": 125e12}  # NVIDIA V100 data sheet: others trained there in fp16, which this project does not


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="pervit_t,pervit_s,deit_t")
    parser.add_argument("--batches", default="4,8", help="default: %(default)s")
    parser.add_argument("--precisions", default="fp32", help="default: %(default)s")
    parser.add_argument("--image-size", type=int, default=224, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--published", action="store_true", help="plans for GPUs against published step times, nothing is run")
    args = parser.parse_args()
    if args.rounds < 1:
        raise UserError(f"--rounds must be at least 1, got {args.rounds}", "pass another number")
    published() if args.published else here(args)


def here(args: argparse.Namespace) -> None:
    """Print the table of this machine."""
    world = init_world()
    torch.set_num_threads(1)
    keep_freed_memory()
    print("| model | images | precision | checkpointing | planned, ms | measured, ms | error |\n|---|---|---|---|---|---|---|")
    errors = []
    for precision in args.precisions.split(","):
        for name in args.models.split(","):
            for batch in map(int, args.batches.split(",")):
                for checkpointing in (False, True):
                    config = _config(name, batch, precision, checkpointing, args.image_size)
                    step = ours(Setting(config, config.model.num_classes, world))
                    step()
                    planned = measured = math.inf
                    for _ in range(args.rounds):
                        rates = measure_cpu(precision, time.process_time)
                        parts = step_parts(Subject(config, 1, 1, None), rates).parts
                        planned = min(planned, sum(parts.values()))
                        began = time.process_time()
                        step()
                        measured = min(measured, time.process_time() - began)
                    del step
                    gc.collect()
                    errors.append(planned / measured - 1)
                    on = "on" if checkpointing else "off"
                    print(
                        f"| {name} | {batch} | {precision} | {on} | {1e3 * planned:.0f} | {1e3 * measured:.0f} | {errors[-1]:+.0%} |",
                        flush=True,
                    )
    _summary(errors)
    disconnect()


def published() -> None:
    """Plan the steps that others have published, write plans and errors beside them, and print the table."""
    with PUBLISHED.open() as file:
        rows = list(csv.DictReader(file))
    print("| GPU | model | images | step | form | planned, ms | measured, ms | error |\n|---|---|---|---|---|---|---|---|")
    errors = defaultdict(list)
    for row in rows:
        planned, measured = 1e3 * planned_seconds(row), float(row["measured_ms"])
        error = planned / measured - 1
        row |= {"planned_ms": f"{planned:.1f}", "error_percent": f"{100 * error:+.0f}"}
        step = row["step"] if row["gpus"] == "1" else f"{row['step']}, {row['gpus']} GPUs"
        cells = (
            row["gpu"],
            row["model"],
            row["images"],
            step,
            row["form"],
            f"{planned:.1f}",
            row["measured_ms"],
            f"{error:+.0%}",
        )
        print(f"| {' | '.join(cells)} |", flush=True)
        errors[row["gpu"]].append(error)
    for gpu, found in errors.items():
        print(f"\n{gpu}: ", end="")
        _summary(found)
    with PUBLISHED.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def planned_seconds(row: Mapping[str, str]) -> float:
    """Seconds of the step that a row of ``plan_time_published.csv`` describes; its model of timm requires the extra `timm`."""
    form, gpu = set(row["form"].split(", ")), GPUS[row["gpu"]]
    if "fp16" in form:
        gpu = replace(gpu, bf16_flops=_FP16_FLOPS[row["gpu"]])
    sizes = (f"train.global_batch_size={int(row['images']) * int(row['gpus'])}", "train.zero_stage=0")
    compiled = f"train.compile={'blocks' if 'compiled' in form else 'off'}"
    subject = Subject(_config(row["model"], int(row["images"]), "bf16", overrides=(*sizes, compiled)), 1, int(row["gpus"]), gpu)
    rates, written_out = GpuRates(gpu), patch.object(F, "scaled_dot_product_attention", _attention_written_out)
    with written_out if "attention written out" in form else nullcontext():
        if row["step"] == "inference":
            step = trace_evaluation(subject.config, subject.layout)
            operators = fused(step.operators, step.kept) if "compiled" in form else step.operators
            return sum(map(rates.seconds, operators))
        with patch.object(time_of_plan, "traced_step", lambda subject: trace_step(subject.config, subject.layout)):
            parts = step_parts(subject, rates).parts
    return sum(seconds for name, seconds in parts.items() if name != OPTIMIZER or "no optimizer" not in form)


def _attention_written_out(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **_: object) -> Tensor:
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return (scores if attn_mask is None else scores + attn_mask).softmax(-1) @ v


def _summary(errors: list[float]) -> None:
    print(
        f"\nErrors from {min(errors):+.0%} to {max(errors):+.0%}, median of their sizes {statistics.median(map(abs, errors)):.0%}."
    )


def _config(
    name: str, batch: int, precision: str, checkpointing: bool = False, image_size: int = 224, overrides: Sequence[str] = ()
) -> Config:
    mine = [
        f"model.name={name}",
        f"model.image_size={image_size}",
        f"train.precision={precision}",
        f"train.global_batch_size={batch}",
        f"train.micro_batch_size={batch}",
        f"eval.batch_size={batch}",
        f"train.activation_checkpointing={str(checkpointing).lower()}",
        "augment.mixup=0",
        "augment.cutmix=0",
    ]
    return load_config(_RECIPE, [*mine, *overrides])


if __name__ == "__main__":
    run_command(main)
