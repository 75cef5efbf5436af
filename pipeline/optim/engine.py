"""The DeepSpeed engine, configured from the run's config: there is no second config file."""

from __future__ import annotations

import math
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from pipeline.config import Config, accumulation_steps
from pipeline.distributed.world import World, quiet_deepspeed
from pipeline.optim.adamw import build_optimizer

Model = TypeVar("Model", bound=nn.Module)
WrappedModel = TypeVar("WrappedModel", bound=nn.Module, covariant=True)


class Engine(Protocol[WrappedModel]):
    """What is used of ``deepspeed.DeepSpeedEngine``, which has no types: the whole dependence on DeepSpeed's interface.

    Parameters under ZeRO-3 have more attributes (``ds_tensor``, ``ds_shape``); :mod:`pipeline.checkpoint.held` reads those, and
    the flat shards of the optimizer.
    """

    @property
    def module(self) -> WrappedModel:
        """The model itself."""

    @property
    def optimizer(self) -> Any:
        """PyTorch's optimizer under ZeRO 0, else DeepSpeed's around it, another class for each stage."""

    def __call__(self, images: Tensor, noise: Tensor | None = ...) -> Tensor:
        """The model's forward pass, with autocast where the config says so."""

    def backward(self, loss: Tensor) -> Any:
        """Accumulate the gradients of a micro-batch and reduce them over ranks. Collective."""

    def step(self) -> None:
        """End a micro-batch; after the last one of a step, take the step. Collective."""

    def zero_grad(self) -> None: ...

    def train(self, mode: bool = ...) -> Any: ...

    def eval(self) -> Any: ...

    def gradient_accumulation_steps(self) -> int: ...

    def is_gradient_accumulation_boundary(self) -> bool: ...

    def was_step_applied(self) -> bool: ...

    def get_global_grad_norm(self) -> float | Tensor | None: ...

    def zero_optimization_stage(self) -> int: ...

    def empty_partition_cache(self) -> None:
        """ZeRO-3: release gathered parameters."""


def deepspeed_config(config: Config, world_size: int) -> dict:
    """DeepSpeed's config.

    Raises:
        UserError: the global batch size is not divisible by micro-batch size times world size.
    """
    return {
        "train_batch_size": config.train.global_batch_size,
        "train_micro_batch_size_per_gpu": config.train.micro_batch_size,
        "gradient_accumulation_steps": accumulation_steps(config.train, world_size, config.augment.unit),
        "gradient_clipping": config.optim.clip_grad_norm or 0.0,
        "zero_optimization": {
            "stage": config.train.zero_stage,
            # With a threshold, small parameters stay gathered and differ in the last bit after a resume.
            "stage3_param_persistence_threshold": 0,
        },
        "zero_allow_untested_optimizer": True,
        # Autocast keeps parameters, gradients and optimizer state in fp32 and works with BatchNorm; DeepSpeed's own
        # bf16 section does not. The empty list keeps gradients in fp32 during communication too.
        "torch_autocast": {
            "enabled": config.train.precision == "bf16",
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],
        },
        "steps_per_print": 10**9,  # never: the run has its own log
    }


def build_engine(model: Model, config: Config, world: World) -> Engine[Model]:
    """Wrap the model for training. Collective.

    Returns:
        The engine, sharded over the ranks as ``train.zero_stage`` says.
    """
    with quiet_deepspeed():
        import deepspeed

        model.to(world.device)
        engine: Engine[Model] = deepspeed.initialize(
            model=model, optimizer=build_optimizer(model, config.optim), config=deepspeed_config(config, world.size)
        )[0]
    return engine


def set_learning_rate(engine: Engine, lr: float) -> None:
    """Set the learning rate of the next step."""
    for group in engine.optimizer.param_groups:
        group["lr"] = lr


def optimizer_step(engine: Engine) -> float | Tensor | None:
    """Step the optimizer if this micro-batch completes an accumulation; a non-finite gradient skips the step. Collective.

    Returns:
        The global gradient norm before clipping, the same on all ranks; not finite if the step was skipped. None between steps.
    """
    if not engine.is_gradient_accumulation_boundary():
        engine.step()
        return None
    if engine.zero_optimization_stage():
        engine.step()  # checks the gradients of all ranks for inf and NaN itself
        return engine.get_global_grad_norm() if engine.was_step_applied() else math.inf
    norm = _replicated_grad_norm(engine)
    if not math.isfinite(norm):
        engine.zero_grad()  # AdamW ignores parameters without a gradient
    engine.step()
    return norm


def _replicated_grad_norm(engine: Engine) -> Tensor:
    """Without ZeRO, DeepSpeed reports no norm, but every rank holds all of the averaged gradients."""
    gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
    return torch.nn.utils.get_total_norm(gradients)
