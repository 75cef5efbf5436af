"""What every model has in common: the train loop and the analyses rely on nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeline.config import Section
from pipeline.models.common.layers import drop_path_scales


class Switches(Section):
    """A family's ablation switches; the defaults are the paper's model. Set with ``model.switches`` in a config."""


class VisionModel(nn.Module):
    """Base of all families. A subclass's ``forward(images, noise=None)`` takes (B, 3, H, W) and returns (B, num_classes).

    Args:
        drop_path_rates: probability of dropping each residual branch, in the order in which they run.
        activation_checkpointing: recompute what :meth:`run_block` runs in the backward pass.
        switches: the family's ablations.

    Attributes:
        reference_names: (authors' name, our name) pairs, read in both directions; the first that fits counts, names that none
            fits are the same on both sides. ``*`` is a number; a name that ends in a dot stands for all that begin with it.
        reference_switches: switches that leave the authors' names as they are: they change shapes, or no parameter at all.
        head_names: how the names of the classifier's parameters begin; fine-tuning on other classes starts them anew.
        leading_tokens: tokens without a place (class token) at the front of the position embeddings.
    """

    reference_names: tuple[tuple[str, str], ...] = ()
    reference_switches: frozenset[str] = frozenset()
    head_names: tuple[str, ...] = ("head.",)
    leading_tokens: int = 0
    drop_path_rates: Tensor  # (branches,), a buffer

    def __init__(self, drop_path_rates: Sequence[float], activation_checkpointing: bool, switches: Switches) -> None:
        super().__init__()
        self.switches = switches
        self.activation_checkpointing = activation_checkpointing
        rates = torch.tensor(drop_path_rates, dtype=torch.get_default_dtype())
        self.register_buffer("drop_path_rates", rates, persistent=False)  # (branches,)
        self._drops = any(rate > 0 for rate in drop_path_rates)

    @property
    def noise_per_sample(self) -> int:
        """How many uniform numbers a training step may draw per image: one per residual branch."""
        return self.drop_path_rates.numel() if self._drops else 0

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that are not decayed although they have more than one dimension."""
        return set()

    def position_names(self) -> set[str]:
        """Names of the (..., tokens, D) position embeddings that another image size resamples."""
        return {name for name, _ in self.named_parameters() if name == "position_embedding.weight"}

    def reference_tables(self) -> dict[str, Tensor]:
        """Fixed tables that the authors keep among their weights, under their names; here they are computed where needed."""
        return {}

    def unpublished_switch(self) -> str | None:
        """Name of a switch whose setting the authors' code has no parameters for; None: it has this model."""
        for name, field in type(self.switches).model_fields.items():
            if name not in self.reference_switches and getattr(self.switches, name) != field.default:
                return name
        return None

    def branch_scales(self, batch: int, noise: Tensor | None) -> Tensor | None:
        """What stochastic depth multiplies each residual branch by.

        Args:
            batch: B.
            noise: (B, noise_per_sample) uniform numbers in [0, 1); drawn from PyTorch's generator when None.

        Returns:
            (B, branches), or None where nothing is dropped: in eval mode, or with rates of 0.
        """
        if not self.training or not self._drops:
            return None
        rates = self.drop_path_rates
        if noise is None:
            noise = torch.rand(batch, rates.numel(), device=rates.device)
        return drop_path_scales(rates, noise)

    def run_block(self, block: nn.Module, *arguments: Any) -> Tensor:
        """``block(*arguments)``, recomputed in the backward pass where activation checkpointing is on.

        Not for blocks with BatchNorm: it would update its statistics twice.
        """
        if self.activation_checkpointing and self.training:
            return checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False)
        return block(*arguments)


def scale_branch(branch: Tensor, scales: Tensor | None, column: int) -> Tensor:
    """A residual branch (B, ...) times column ``column`` of the (B, branches) factors, if there are any."""
    if scales is None:
        return branch
    return branch * scales[:, column].view(-1, *[1] * (branch.ndim - 1)).to(branch.dtype)


def scales_of_block(scales: Tensor | None, block: int, branches: int = 2) -> Tensor | None:
    """The columns of the (B, all branches) factors that belong to one block: (B, branches)."""
    return None if scales is None else scales[:, branches * block : branches * (block + 1)]


def linear_drop_path(rate: float, blocks: int, branches: int = 2) -> list[float]:
    """DeiT's rule: rates grow linearly from 0 in the first block to ``rate`` in the last; each branch of a block alike."""
    return torch.linspace(0, rate, blocks, device="cpu").repeat_interleave(branches).tolist()
