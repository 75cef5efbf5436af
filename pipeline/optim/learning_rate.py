"""Compute the learning rate of a step: linear warm-up, then cosine decay."""

from __future__ import annotations

import math

from pipeline.config import OptimConfig


def learning_rate(step: int, steps_per_epoch: float, epochs: float, global_batch_size: int, config: OptimConfig) -> float:
    """Linear warm-up, then cosine decay to ``min_lr`` (Loshchilov & Hutter, 2017); a pure function of the step.

    As in timm, whose scheduler the papers' code uses, the cosine counts from the first step, so that after a warm-up of w of n
    epochs it goes on at cos(pi w / n); with ``warmup_prefix`` it begins there, at its peak.

    Args:
        step: optimizer steps completed before this one.
        steps_per_epoch: may be fractional: epochs follow each other without a gap.
        epochs: where the cosine ends; from there on the rate is ``min_lr``.
        global_batch_size: the peak is ``lr * global_batch_size / lr_batch_size``, the linear scaling rule (Goyal et al., 2017).
        config: warm-up, peak and end of the schedule.
    """
    peak = config.lr * global_batch_size / config.lr_batch_size
    warmup, total = config.warmup_epochs * steps_per_epoch, epochs * steps_per_epoch
    if step < warmup:
        return config.warmup_lr + (peak - config.warmup_lr) * step / warmup
    begin = warmup if config.warmup_prefix else 0.0
    progress = min(1.0, (step - begin) / max(total - begin, 1e-9))  # the bound: a schedule that is all warm-up has no decay
    return config.min_lr + 0.5 * (peak - config.min_lr) * (1 + math.cos(math.pi * progress))
