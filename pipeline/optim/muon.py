"""Muon for the matrices of the blocks and AdamW for all else, for parameters that are split over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.distributed.world import World
from pipeline.optim.engine_protocol import Engine
from pipeline.optim.groups import MATRICES
from pipeline.optim.slices import Slice, SliceOptimizer


class MuonAdamW(SliceOptimizer, torch.optim.AdamW):
    """PyTorch's ``Muon`` (Jordan et al., 2024) for some parameter groups, PyTorch's ``AdamW`` for the others.

    Momentum with Nesterov's step, orthogonalized by five Newton-Schulz iterations in bf16; decoupled weight decay. The step of an
    (m, n) matrix is scaled by 0.2 √max(m, n), PyTorch's ``match_rms_adamw`` (Liu et al., "Muon is Scalable for LLM Training", 2025), so
    that both optimizers share one learning rate and weight decay, those of AdamW.

    Orthogonalization needs whole matrices, momentum does not: it is kept in slices, as AdamW's moments are. In every step the slices of
    the matrices that are split are put together, in bf16, which is what PyTorch's iteration takes. A rank orthogonalizes those
    matrices that it holds a part of: with ZeRO 1 and 2 its share and the two at its ends, with ZeRO 0 and 3 all of them.

    DeepSpeed's own Muon iterates in other precision at every ZeRO stage but 0, and clips the orthogonalized step, not the gradient.

    Args:
        groups: with ``params``, ``names``, ``weight_decay`` and ``matrices``: true for groups of matrices.
        lr: learning rate of both.
        momentum: Muon's.
        betas: AdamW's decay rates of the moment estimates.
        eps: AdamW's.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], lr: float, momentum: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True)
        self._momentum = momentum
        unused = torch.zeros(1, 1, device="cpu")
        self._orthogonalizer = torch.optim.Muon(
            [unused], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="match_rms_adamw"
        )
        self._of_matrices: set[Tensor] = {
            tensor for group in self.param_groups if group[MATRICES] for tensor in group["params"]
        }

    def place(self, engine: Engine, world: World) -> None:
        super().place(engine, world)
        assert self._placed is not None
        matrices = {name for group in self.param_groups if group[MATRICES] for name in group["names"]}
        self._of_matrices = {tensor for tensor, slices in self._placed.items() if slices[0].name in matrices}

    def initial_state(self, tensor: Tensor, step: int) -> dict[str, Tensor]:
        if tensor in self._of_matrices:  # the step is on the CPU: counting must not start a kernel
            return {"step": torch.tensor(float(step), device="cpu"), "momentum_buffer": torch.zeros_like(tensor)}
        zeros = {name: torch.zeros_like(tensor) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.tensor(float(step), dtype=torch.float32, device=tensor.device), **zeros}

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
            if not self.state[tensor]:
                self.state[tensor] = self.initial_state(tensor, 0)
            state, gradient = self.state[tensor], tensor.grad
            assert gradient is not None
            state["step"] += 1
            momentum = state["momentum_buffer"].lerp_(gradient, 1 - self._momentum)
            updates[tensor] = gradient.lerp(momentum, self._momentum)
            tensor.mul_(1 - lr * group["weight_decay"])
        slices = list(self.slices_in(tensors))
        steps = [piece.of(updates[piece.tensor]) for piece in slices]
        joined = self._joined(group, slices, steps, tensors[0])
        for piece, step in zip(slices, steps):
            matrix = joined[piece.name] if piece.name in joined else step
            direction = self._orthogonalized(matrix.view(piece.shape))
            piece.of(piece.tensor).add_(direction.view(-1)[piece.start : piece.start + piece.count], alpha=-lr)

    def _joined(self, group: dict[str, Any], slices: list[Slice], steps: list[Tensor], like: Tensor) -> dict[str, Tensor]:
        """The group's matrices that are split over ranks, flattened, from the slices of all ranks, in bf16.

        Args:
            steps: of this rank's slices, (count,) each.
        """
        names = self.split_names(group)
        if not names:
            return {}
        flat = torch.zeros(sum(self.shapes[name].numel() for name in names), dtype=torch.bfloat16, device=like.device)
        joined = dict(zip(names, flat.split([self.shapes[name].numel() for name in names])))
        for piece, step in zip(slices, steps):
            if piece.name in joined:
                joined[piece.name][piece.start : piece.start + piece.count] = step
        dist.all_reduce(flat)  # exact: each number is from one rank, 0 from the others
        return joined

    def _orthogonalized(self, matrix: Tensor) -> Tensor:
        """The nearest semi-orthogonal matrix, approximately, with the scale of AdamW's step: (m, n) -> (m, n) float32."""
        scratch = torch.zeros_like(matrix, dtype=torch.float32)
        scratch.grad = matrix.float()
        self._orthogonalizer.param_groups[0]["params"] = [scratch]
        self._orthogonalizer.step()  # without momentum and decay, at a rate of 1: from 0 to minus the direction
        self._orthogonalizer.state.clear()
        # Else the next step begins with this matrix, and where its gradient is a view, with all that it is a view of.
        self._orthogonalizer.param_groups[0]["params"], scratch.grad = [], None
        return scratch.neg_()
