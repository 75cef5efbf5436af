"""The authors' form of a training step: what the stages ``steps_*`` are compared with.

Their model (every (N, N) matrix written out, Φp's convolutions over 4 x heads maps, layer by layer) in their loop, which is DeiT's:
the loss to the CPU and a wait for the device in every step, dense targets, PyTorch's AdamW, one GPU. Autocast is to bf16, theirs
to fp16. The batch lies in memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.gpu.common import Context, PeakMemory, Values, synchronize
from benchmarks.gpu.in_memory import InMemory
from benchmarks.gpu.trace import idle, profiled
from pipeline.config import Config
from pipeline.loader.batches import TrainBatches
from pipeline.models import create_model
from pipeline.shards.shard_set import ShardSet
from pipeline.step.train_step import sample_noise


def measure_authors(context: Context, config: Config, flops_per_image: float, peak: float) -> Values:
    """Figures of the authors' step, by the names that those of ours have."""
    device, batch = context.device, config.train.micro_batch_size
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
    values = {
        "images/s": rate,
        "ms/step": 1e3 * batch / rate,
        "MFU": f"{rate * flops_per_image / peak:.1%}",
        "peak GiB": memory.gib(),
    }
    values |= profiled(step, device, 1 if context.miniature else 3)
    return {**values, **idle(values)}


def authors_step(config: Config, device: torch.device, shards: Path) -> Callable[[], object]:
    """A step of the authors' model on the next batch."""
    wanted = config.model
    model = authors_model(create_model(wanted.name, wanted.num_classes, wanted.image_size, wanted.drop_path)).to(device).train()
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


def authors_model(model: Any) -> Any:
    """Change a PerViT in place into the authors' form."""
    try:
        from benchmarks.step_authors import authors_form
    except ImportError:  # code from before benchmarks/step.py
        from benchmarks import peripheral_attention as published
        from pipeline.models.pervit.model import PeripheralAttention
        from pipeline.models.pervit.position import FirstProjection

        for module in model.modules():
            if isinstance(module, PeripheralAttention):
                module.__class__ = published.PublishedAttention
            if isinstance(module, FirstProjection):
                module.__class__ = published.PublishedProjection
        return model
    return authors_form(model)
