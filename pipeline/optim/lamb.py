"""Step with LAMB (You et al., "Large Batch Optimization for Deep Learning", ICLR 2020) for parameters that are split over ranks."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.config import OptimConfig
from pipeline.optim.description import Group, OptimizerDescription, StateNames
from pipeline.optim.slices import Slice, SliceOptimizer

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Lamb(SliceOptimizer):
    """LAMB as in timm's ``Lamb`` and NVIDIA apex's ``FusedLAMB``, with which DeiT III was trained, by their defaults but one.

    Bias correction; weight decay is part of the update, before the trust ratio ‖w‖ / ‖update‖; no upper bound on that ratio; and
    parameters without weight decay take Adam's step. The exception: theirs clip the global gradient norm at 1.0 by themselves, here
    ``optim.clip_grad_norm`` does.

    The norms are those of whole parameters, whichever ranks hold their slices. That is why this is not DeepSpeed's ``FusedLamb``: it
    takes a flat shard of many parameters for one parameter, and exists for GPUs only. PyTorch has no LAMB.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "names": []})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every tensor that has a gradient. Collective where parameters are split over ranks."""
        for group in self.param_groups:
            if tensors := [tensor for tensor in group["params"] if tensor.grad is not None]:
                self._step_group(group, tensors)

    def _step_group(self, group: dict[str, Any], tensors: list[Tensor]) -> None:
        states = [self.count_step(tensor, _MOMENTS) for tensor in tensors]
        first, second = ([state[name] for state in states] for name in _MOMENTS)
        (beta1, beta2), step = group["betas"], states[0]["step"].item()
        gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, value=1 - beta2)
        denominators = torch._foreach_sqrt(second)
        torch._foreach_div_(denominators, (1 - beta2**step) ** 0.5)
        torch._foreach_add_(denominators, group["eps"])
        updates = list(torch._foreach_div(first, 1 - beta1**step))
        torch._foreach_div_(updates, denominators)
        if group["weight_decay"]:
            torch._foreach_add_(updates, tensors, alpha=group["weight_decay"])
            self._scale_by_trust_ratios(group, tensors, updates)
        torch._foreach_add_(tensors, updates, alpha=-group["lr"])

    def _scale_by_trust_ratios(self, group: dict[str, Any], tensors: list[Tensor], updates: list[Tensor]) -> None:
        update_of = dict(zip(tensors, updates))
        slices = list(self.slices_in(tensors))
        scaled = [piece.of(update_of[piece.tensor]) for piece in slices]
        norms = tensors[0].new_zeros(2, 0, dtype=torch.float64)  # of no slices: this rank's shard of the group is padding
        if slices:
            held = [piece.of(piece.tensor) for piece in slices]
            norms = torch.stack(torch._foreach_norm([*held, *scaled])).double().view(2, -1)  # (2, slices)
        weights, steps = self._of_whole_parameters(norms, slices, group)
        ratios = torch.where((weights > 0) & (steps > 0), weights / steps, 1.0).to(updates[0].dtype)  # (slices,)
        for values, ratio in zip(scaled, ratios.unbind()):
            values.mul_(ratio)

    def _of_whole_parameters(self, norms: Tensor, slices: list[Slice], group: dict[str, Any]) -> Tensor:
        """From the norms of this rank's slices, (2, slices), those of the parameters that the slices belong to."""
        split = {name: column for column, name in enumerate(self.split_names(group))}
        if not split:
            return norms
        mine = [(number, split[piece.name]) for number, piece in enumerate(slices) if piece.name in split]
        numbers, columns = torch.tensor(mine, dtype=torch.long, device=norms.device).view(-1, 2).unbind(1)
        squares = norms.new_zeros(2, len(split))  # (2, split parameters), of all ranks after the reduction
        squares[:, columns] = norms[:, numbers].square()
        dist.all_reduce(squares)
        norms[:, numbers] = squares.sqrt()[:, columns]
        return norms


class LambDescription(OptimizerDescription):
    """LAMB: Adam's moments; norms of weights and updates, and an update that is written before it is applied."""

    title = "LAMB"
    passes = 12
    kept = StateNames(_MOMENTS, ("step",))

    def build(self, groups: list[dict[str, Any]], config: OptimConfig, precision: str) -> torch.optim.Optimizer:
        return Lamb(groups, config.warmup_lr, config.betas, config.eps)

    def temporaries(self, group: Group, size: float, split: bool, precision: str) -> float:
        return 2 * size  # denominators and updates

    def remark(self, config: OptimConfig) -> str | None:
        if config.clip_grad_norm:
            return None
        return "optim.clip_grad_norm is null, so nothing clips the gradients; LAMB in timm and apex clips them at 1.0"


DESCRIPTION = LambDescription()
