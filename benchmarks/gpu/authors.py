"""Stage ``authors``: the authors' form of a training step, which ours is compared with.

Their model (every (N, N) matrix written out, Φp's convolutions over 4 x heads maps, layer by layer) in their loop, which is DeiT's:
the loss to the CPU and a wait for the device in every step, dense targets, PyTorch's AdamW, one GPU. Autocast is to bf16, theirs
to fp16. The batch lies in memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F

from benchmarks.gpu.common import PROFILED, Context, PeakMemory, Values, synchronize
from benchmarks.gpu.in_memory import InMemory
from benchmarks.gpu.trace import profiled
from benchmarks.step_authors import authors_form
from pipeline.config import Config
from pipeline.hardware import native_bf16, peak_flops
from pipeline.loader.batches import TrainBatches
from pipeline.models import create_model, flops
from pipeline.shards.shard_set import ShardSet
from pipeline.step.train_step import sample_noise


def measure_authors(context: Context, config: Config) -> Values:
    """Figures of the authors' step, by the names that those of ours have; its utilization is counted as ours is."""
    device, batch = context.device, context.batch
    memory = PeakMemory(device)
    step = authors_step(config, device, context.shards)
    warm, steps = (1, 1) if context.miniature else (8, 20)
    for _ in range(warm):
        step()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize(device)
    rate = steps * batch / (time.perf_counter() - began)
    values = {"ms": 1e3 * batch / rate, "images_per_second": rate, "peak_gib": memory.gib()}
    if device.type == "cuda":
        cost = flops.count(config.model.name, config.model.image_size, config.model.num_classes, config.model.switches)
        peak, _ = peak_flops(device, "bf16" if native_bf16(device)[0] else "fp32")
        values["mfu"] = rate * cost.training_flops_per_image(batch) / peak
    values |= profiled(step, device, 1 if context.miniature else PROFILED)
    values.pop("kernels", None)
    return values


def authors_step(config: Config, device: torch.device, shards: Path) -> Callable[[], object]:
    """A step of the authors' model on the next batch."""
    wanted = config.model
    model = authors_form(create_model(wanted.name, wanted.num_classes, wanted.image_size, wanted.drop_path)).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=config.optim.weight_decay)
    batches = InMemory(TrainBatches.of_run(ShardSet(str(shards), "train"), config), device, config.data.max_bad_samples)
    smoothing, classes = config.train.label_smoothing, wanted.num_classes

    def step() -> float:
        batch = next(batches)
        own, other = (F.one_hot(each, classes).float() for each in (batch.labels, batch.other_labels))
        targets = batch.weight[:, None] * own + (1 - batch.weight[:, None]) * other  # (B, classes)
        targets = (1 - smoothing) * targets + smoothing / classes
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            scores = model(batch.images, sample_noise(model, batch, config.seed))
            loss = torch.sum(-targets * F.log_softmax(scores, dim=-1), dim=-1).mean()
        value = loss.item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        synchronize(device)
        return value

    return step
