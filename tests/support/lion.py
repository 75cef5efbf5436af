"""Lion (Chen et al., 2023), as a user would write it: a file that the package knows nothing of, ``optim.name=support.lion:Lion``."""

from __future__ import annotations

import torch


class Lion(torch.optim.Optimizer):
    """The sign of an interpolated momentum, and decoupled weight decay; it keeps one tensor for each parameter, and no step."""

    def __init__(self, params, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            (first, second), lr = group["betas"], group["lr"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                update = state["momentum"].lerp(parameter.grad, 1 - first).sign_()
                parameter.mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-lr)
                state["momentum"].lerp_(parameter.grad, 1 - second)


class Counting(Lion):
    """An optimizer that counts outside of its state, so that no checkpoint can restore it."""

    calls = 0

    def step(self, closure=None) -> None:
        self.calls += 1
        for group in self.param_groups:
            group["lr"] /= self.calls
        super().step()


class Normalized(Lion):
    """An update by the norm of the whole tensor: right on parameters, wrong on the slices of ZeRO."""

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(parameter.grad.norm() + 1e-12)
                    parameter.sub_(parameter.grad, alpha=group["lr"])
