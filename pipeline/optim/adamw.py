"""Describe AdamW."""

from typing import Any

import torch

from pipeline.config import OptimConfig
from pipeline.optim.description import Group, OptimizerDescription, StateNames


class AdamW(OptimizerDescription):
    """AdamW (Loshchilov & Hutter, 2019), PyTorch's, in one fused kernel: each weight, gradient and moment is read and written once."""

    title = "AdamW"
    passes = 7

    def build(self, groups: list[dict[str, Any]], config: OptimConfig) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=config.warmup_lr, betas=config.betas, eps=config.eps, fused=True)

    def state(self, group: Group) -> StateNames:
        return StateNames(("exp_avg", "exp_avg_sq"), ("step",))


DESCRIPTION = AdamW()
