"""Describe SGD with momentum."""

from typing import Any

import torch

from pipeline.config import OptimConfig
from pipeline.optim.description import Group, OptimizerDescription, StateNames


class SGD(OptimizerDescription):
    """SGD with Nesterov's momentum, PyTorch's, in one fused kernel: what timm calls ``sgd``. Weight decay is part of the gradient."""

    title = "SGD with momentum"
    passes = 5

    def build(self, groups: list[dict[str, Any]], config: OptimConfig) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=config.warmup_lr, momentum=config.momentum, nesterov=True, fused=True)

    def state(self, group: Group) -> StateNames:
        return StateNames(("momentum_buffer",))


DESCRIPTION = SGD()
