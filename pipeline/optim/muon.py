"""Step with Muon for matrices and AdamW for all else, for parameters that are split over ranks."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.config import OptimConfig
from pipeline.errors import UserError
from pipeline.optim.description import MATRICES, AdamW, Group, StateNames
from pipeline.optim.slices import Slice, SliceOptimizer

_KEPT = ("momentum_buffer",)  # for a matrix
_ITERATIONS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315  # of the quintic iteration (Jordan et al., 2024)
_SMALLEST_NORM = 1e-7
_COLOURS = 3  # channels of an image


class MuonAdamW(SliceOptimizer, torch.optim.AdamW):
    """PyTorch's ``Muon`` (Jordan et al., 2024) for some parameter groups, PyTorch's ``AdamW`` for the others. A convolution's weight is
    a matrix of (output channels, input channels x height x width).

    Momentum with Nesterov's step, orthogonalized by five Newton-Schulz iterations; decoupled weight decay. The step of an
    (m, n) matrix is scaled by 0.2 √max(m, n), PyTorch's ``match_rms_adamw`` (Liu et al., "Muon is Scalable for LLM Training", 2025), so
    that both optimizers share one learning rate and weight decay, those of AdamW. A training in bf16 iterates in bf16, as PyTorch's
    does always, one in fp32 in fp32: without bf16 instructions a CPU takes a tenth of the time, and less rounding is amplified.

    Orthogonalization needs whole matrices, momentum does not: it is kept in slices, as AdamW's moments are. In every step the slices of
    the matrices that are split are put together, in the iteration's precision. A rank orthogonalizes those
    matrices that it holds a part of: with ZeRO 1 and 2 its share and the two at its ends, with ZeRO 0 and 3 all of them.

    DeepSpeed's own Muon iterates in other precision at every ZeRO stage but 0, and clips the orthogonalized step, not the gradient.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
        iterates: torch.dtype,
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True)
        self._momentum, self._iterates = momentum, iterates

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every tensor that has a gradient. Collective where parameters are split over ranks."""
        groups = self.param_groups
        for group in groups:
            tensors = [tensor for tensor in group["params"] if tensor.grad is not None]
            if group[MATRICES] and tensors:
                self._step_matrices(group, tensors)
        self.param_groups = [group for group in groups if not group[MATRICES]]
        try:
            super().step()
        finally:
            self.param_groups = groups

    def _step_matrices(self, group: dict[str, Any], tensors: list[Tensor]) -> None:
        lr, updates = group["lr"], {}
        for tensor in tensors:
            gradient = tensor.grad
            assert gradient is not None
            momentum = self.count_step(tensor, _KEPT)["momentum_buffer"].lerp_(gradient, 1 - self._momentum)
            updates[tensor] = gradient.lerp(momentum, self._momentum)
            tensor.mul_(1 - lr * group["weight_decay"])
        slices = list(self.slices_in(tensors))
        steps = [piece.of(updates[piece.tensor]) for piece in slices]
        joined = self._joined(group, slices, steps, tensors[0])
        for piece, step in zip(slices, steps):
            matrix = joined[piece.name] if piece.name in joined else step
            direction = _orthogonalized(matrix.view(piece.shape[0], -1), self._iterates)
            piece.of(piece.tensor).add_(direction.reshape(-1)[piece.start : piece.start + piece.count], alpha=-lr)

    def _joined(self, group: dict[str, Any], slices: list[Slice], steps: list[Tensor], like: Tensor) -> dict[str, Tensor]:
        """The group's matrices that are split over ranks, flattened, put together from the ``steps`` of all ranks' slices."""
        names = self.split_names(group)
        if not names:
            return {}
        flat = torch.zeros(sum(self.shapes[name].numel() for name in names), dtype=self._iterates, device=like.device)
        joined = dict(zip(names, flat.split([self.shapes[name].numel() for name in names])))
        for piece, step in zip(slices, steps):
            if piece.name in joined:
                joined[piece.name][piece.start : piece.start + piece.count] = step
        dist.all_reduce(flat)  # exact: each number is from one rank, 0 from the others
        return joined


def _orthogonalized(matrix: Tensor, iterates: torch.dtype) -> Tensor:
    """The nearest semi-orthogonal matrix, approximately, with the scale of AdamW's step: (m, n) -> (m, n) float32.

    The arithmetic is that of ``torch.optim.Muon``, in ``iterates`` instead of always in bf16; its own function for it is private.
    """
    rows, columns = matrix.shape
    x = matrix.to(iterates)
    x = x.T if rows > columns else x
    x = x / x.norm().clamp(min=_SMALLEST_NORM)
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    x = x.T if rows > columns else x
    return x.float() * (0.2 * math.sqrt(max(rows, columns)))


class MuonDescription(AdamW):
    """Muon: a momentum for matrices, AdamW's moments for the rest."""

    title = "Muon"
    passes = 8

    def build(self, groups: list[dict[str, Any]], config: OptimConfig, precision: str) -> torch.optim.Optimizer:
        iterates = torch.bfloat16 if precision == "bf16" else torch.float32
        return MuonAdamW(groups, config.warmup_lr, config.momentum, config.betas, config.eps, iterates)

    def state(self, group: Group) -> StateNames:
        return StateNames(_KEPT, ("step",)) if group[MATRICES] else super().state(group)

    def matrices(self, model: nn.Module) -> set[str]:
        """Weights of linear layers and of dense convolutions, but those of the image and of the classifier, for which Muon is not made
        (Jordan et al., 2024)."""
        heads: tuple[str, ...] = model.head_names  # type: ignore[assignment]
        names = {
            f"{name}.weight"
            for name, each in model.named_modules()
            if isinstance(each, (nn.Linear, nn.Conv2d)) and each.weight.requires_grad and not f"{name}.".startswith(heads)
            if isinstance(each, nn.Linear) or (each.groups == 1 and each.in_channels > _COLOURS)
        }
        if not names:
            got = f"got {type(model).__name__}, which has none"
            must = "optim.name=muon requires a model with weight matrices before its classifier"
            raise UserError(f"{must}, {got}", "set optim.name=adamw")
        return names

    def temporaries(self, group: Group, size: float, split: bool, precision: str) -> float:
        if not group[MATRICES]:
            return super().temporaries(group, size, split, precision)
        sizes = [parameter.numel() for parameter in group["params"]]
        joined = sum(sizes) * (0.5 if precision == "bf16" else 1.0) if split else 0.0  # split matrices put together
        return size + joined + 5 * max(sizes)  # updates; scratch and iterates of one matrix

    def matrix_flops(self, shape: tuple[int, ...]) -> float:
        if len(shape) < 2:
            return 0.0
        small, large = sorted((shape[0], math.prod(shape[1:])))  # each iteration: X Xᵀ, its square, and their product with X
        return _ITERATIONS * 2 * (2 * small * small * large + small**3)

    def summary(self, parameters: Mapping[str, nn.Parameter], matrices: set[str]) -> str:
        share = sum(parameters[name].numel() for name in matrices) / sum(p.numel() for p in parameters.values())
        return f"Muon for {len(matrices)} matrices ({share:.0%} of the parameters) and AdamW for the rest"


DESCRIPTION = MuonDescription()
