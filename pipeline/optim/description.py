"""Describe an optimizer to the rest of the pipeline: one description each, beside its construction.

Checkpoints ask what an optimizer keeps, the engine whether ZeRO may slice it, plans what its step takes, and the log what it is called.
Those of PyTorch are here. A new built-in optimizer is a module ``pipeline.optim.NAME`` with its class and its ``DESCRIPTION``, and its
name in the config's :data:`~pipeline.config.train_sections.BUILT_IN_OPTIMIZERS`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipeline.config import OptimConfig

MATRICES = "matrices"  # key of a parameter group: whether the optimizer updates its parameters as matrices

Group = Mapping[str, Any]  # a parameter group, see :func:`pipeline.optim.build.parameter_groups`


@dataclass(frozen=True)
class StateNames:
    """Names of what an optimizer keeps for a parameter, the keys of ``optimizer.state[parameter]``."""

    tensors: tuple[str, ...]  # of the parameter's shape: element i belongs to element i of the parameter
    scalars: tuple[str, ...] = ()  # numbers that depend on the steps taken, not on gradients: equal for a group's parameters


class OptimizerDescription:
    """An optimizer: how it is built, what it keeps and what its step takes. The defaults are those of an elementwise optimizer."""

    title: str  # for people, such as ``AdamW``
    # Whether it steps right on slices of parameters, as ZeRO 1 to 3 hand them out: the update of an element needs that element only, or
    # the class puts whole parameters together (:class:`~pipeline.optim.slices.SliceOptimizer`).
    takes_slices: bool = True
    passes: float  # numbers that a step reads and writes for each parameter, in memory; an estimate for plans
    kept: StateNames  # what is kept for each parameter once a step was taken

    def build(self, groups: list[dict[str, Any]], config: OptimConfig, precision: str) -> torch.optim.Optimizer:
        """Construct the optimizer for some parameter groups, each with ``params``, ``names``, ``weight_decay`` and :data:`MATRICES`.

        The learning rate is a placeholder: the engine sets each group's before every step. ``precision``: "bf16" or "fp32", of the
        training's matrix products, for an optimizer that multiplies matrices.
        """
        raise NotImplementedError

    def state(self, group: Group) -> StateNames:
        """What is :attr:`kept` for each parameter of a group; of the group, :data:`MATRICES` is enough."""
        return self.kept

    def matrices(self, model: nn.Module) -> set[str]:
        """Names of the parameters that are updated as matrices; they get groups of their own. Raises UserError: the model has
        none, but the optimizer is made for them."""
        return set()

    def temporaries(self, group: Group, size: float, split: bool, precision: str) -> float:
        """Elements of float32 that the update of a group, with ``params``, allocates and frees again; an estimate for plans.
        ``size``: elements of the group that this rank updates; ``split``: whether ZeRO divides it between ranks; ``precision``: as in :meth:`build`."""
        return 0.0

    def matrix_flops(self, shape: tuple[int, ...]) -> float:
        """Floating-point operations of the matrix products in the update of a parameter; an estimate for plans."""
        return 0.0

    def summary(self, parameters: Mapping[str, nn.Parameter], matrices: set[str]) -> str:
        """A few words for the log about the trained ``parameters``, by name, of which those in ``matrices`` are updated as such."""
        return self.title

    def remark(self, config: OptimConfig) -> str | None:
        """A sentence for the log about keys that are unusual for this optimizer; None: nothing."""
        return None


class AdamW(OptimizerDescription):
    """AdamW (Loshchilov & Hutter, 2019), PyTorch's, in one fused kernel: each weight, gradient and moment is read and written once."""

    title = "AdamW"
    passes = 7
    kept = StateNames(("exp_avg", "exp_avg_sq"), ("step",))

    def build(self, groups: list[dict[str, Any]], config: OptimConfig, precision: str) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=config.warmup_lr, betas=config.betas, eps=config.eps, fused=True)


class SGD(OptimizerDescription):
    """SGD with Nesterov's momentum, PyTorch's, in one fused kernel: what timm calls ``sgd``. Weight decay is part of the gradient."""

    title = "SGD with momentum"
    passes = 5
    kept = StateNames(("momentum_buffer",))

    def build(self, groups: list[dict[str, Any]], config: OptimConfig, precision: str) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=config.warmup_lr, momentum=config.momentum, nesterov=True, fused=True)


OF_PYTORCH: dict[str, OptimizerDescription] = {"adamw": AdamW(), "sgd": SGD()}
