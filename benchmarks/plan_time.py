"""What ``pipeline.plan`` says of time against measurement.

    python -m benchmarks.plan_time [--models pervit_t,pervit_s,deit_t] [--batches 4,8] [--precisions fp32,bf16] [--rounds 3]
    python -m benchmarks.plan_time --published

A step on this machine's CPU, with and without activation checkpointing: the plan measures the machine for two seconds and counts the
rest; the measurement is a training step through DeepSpeed's engine. Both in CPU time of one thread, so that other users of the machine
matter little, in turns, the least of several rounds. ``--published`` compares the plan for two GPUs with step times that others have
measured.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
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
from pipeline.planning.memory import Subject
from pipeline.planning.rates import GpuRates, measure_cpu
from pipeline.planning.time import step_parts
from pipeline.planning.trace import fused
from pipeline.planning.traced_step import Layout, trace_evaluation, trace_step

_RECIPE = Path("configs/pervit_t.yaml")
# Milliseconds of a step by timm (github.com/huggingface/pytorch-image-models, results/), mixed precision, 224 px: training on an RTX
# 3090 (benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv; attention written out, SGD), inference of 1,024 images on an RTX 4090
# (benchmark-infer-amp-nchw-pt291-cu128-4090.csv, and -dynamo.csv with torch.compile). Models whose form there is that of ours.
_TRAINING = {
    "deit_t": (512, 222.7), "deit_s": (384, 363.6), "deit_b": (192, 490.3),
    "deit3_s": (384, 392.0), "deit3_b": (192, 515.5), "gmlp_s": (192, 299.0),
}  # fmt: skip
_INFERENCE = {
    "deit_t": (55.2, 43.6), "deit_s": (124.8, 104.7), "deit_b": (342.5, 304.2),
    "deit3_s": (141.9, 104.6), "deit3_b": (375.8, 308.4), "gmlp_s": (357.0, 135.1),
}  # fmt: skip
_INFERENCE_BATCH = 1024
_ONE_GPU = Layout(world_size=1, stage=0, accumulates=False, on_gpu=True, kernels=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="pervit_t,pervit_s,deit_t")
    parser.add_argument("--batches", default="4,8", help="default: %(default)s")
    parser.add_argument("--precisions", default="fp32", help="default: %(default)s")
    parser.add_argument("--image-size", type=int, default=224, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument(
        "--published", action="store_true", help="the plan for GPUs against published step times, nothing is run"
    )
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
    """Print the plan for two GPUs beside step times that timm has measured."""
    print("| model | step | planned, ms | measured by timm, ms | error |\n|---|---|---|---|---|")
    errors = []
    for name, (batch, took) in _TRAINING.items():
        with patch.object(F, "scaled_dot_product_attention", _attention_written_out):
            step = trace_step(_config(name, batch, "bf16"), _ONE_GPU)
        seconds = sum(map(GpuRates(GPUS["rtx3090-24g"]).seconds, step.operators))
        errors.append(_row(name, f"training, {batch} images, RTX 3090", seconds, took))
    rates = GpuRates(GPUS["rtx4090-24g"])
    for name, (eager, compiled) in _INFERENCE.items():
        step = trace_evaluation(_config(name, _INFERENCE_BATCH, "bf16"), _ONE_GPU)
        errors.append(_row(name, "inference, RTX 4090", sum(map(rates.seconds, step.operators)), eager))
        seconds = sum(map(rates.seconds, fused(step.operators, step.kept)))
        errors.append(_row(name, "inference, RTX 4090, compiled", seconds, compiled))
    _summary(errors)


def _attention_written_out(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
    scores = q @ k.transpose(-1, -2) * scale
    return (scores if attn_mask is None else scores + attn_mask).softmax(-1) @ v


def _row(name: str, what: str, planned: float, measured: float) -> float:
    error = 1e3 * planned / measured - 1
    print(f"| {name} | {what} | {1e3 * planned:.0f} | {measured:.0f} | {error:+.0%} |")
    return error


def _summary(errors: list[float]) -> None:
    print(
        f"\nErrors from {min(errors):+.0%} to {max(errors):+.0%}, median of their sizes {statistics.median(map(abs, errors)):.0%}."
    )


def _config(name: str, batch: int, precision: str, checkpointing: bool = False, image_size: int = 224) -> Config:
    overrides = [
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
    return load_config(_RECIPE, overrides)


if __name__ == "__main__":
    run_command(main)
