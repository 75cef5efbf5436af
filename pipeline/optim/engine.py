"""The DeepSpeed engine, configured from the run's config: there is no second config file."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pipeline.config import Config, accumulation_steps
from pipeline.distributed.world import World, quiet_deepspeed
from pipeline.optim.adamw import build_optimizer


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


def build_engine(model: nn.Module, config: Config, world: World):
    """Wrap the model for training. Collective.

    Returns:
        ``deepspeed.DeepSpeedEngine``, sharded over the ranks as ``train.zero_stage`` says.
    """
    with quiet_deepspeed():
        import deepspeed

        model.to(world.device)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=build_optimizer(model, config.optim), config=deepspeed_config(config, world.size)
        )
    return engine


def set_learning_rate(engine, lr: float) -> None:
    """Set the learning rate of the next step."""
    for group in engine.optimizer.param_groups:
        group["lr"] = lr


def optimizer_step(engine) -> float | Tensor | None:
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


def _replicated_grad_norm(engine) -> Tensor:
    """Without ZeRO, DeepSpeed reports no norm, but every rank holds all of the averaged gradients."""
    gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
    return torch.nn.utils.get_total_norm(gradients)
