"""Build the optimizer of a config for a model: its description, its parameter groups, the optimizer itself, and its learning rate."""

import math
from importlib import import_module
from typing import Any

import torch
from torch import nn

from pipeline.config import OptimConfig
from pipeline.config.train_sections import BUILT_IN_OPTIMIZERS
from pipeline.errors import UserError
from pipeline.optim.description import MATRICES, OF_PYTORCH, OptimizerDescription
from pipeline.optim.imported import imported_optimizer

LR_SCALE = "lr_scale"  # key of a group: fraction of the schedule's learning rate; without it, all of it


def optimizer_description(config: OptimConfig) -> OptimizerDescription:
    """The description of the config's optimizer: the only place where anything is known about it. Raises UserError: a class of
    another package (``optim.name=module:Class``) cannot be imported or trained with; see :mod:`pipeline.optim.imported`."""
    if config.name not in BUILT_IN_OPTIMIZERS:
        return imported_optimizer(config)
    return OF_PYTORCH.get(config.name) or import_module(f"pipeline.optim.{config.name}").DESCRIPTION


def build_optimizer(model: nn.Module, config: OptimConfig, precision: str = "fp32") -> torch.optim.Optimizer:
    """Build the optimizer ``optim.name`` with the groups of :func:`parameter_groups` and a placeholder for the learning rate.
    ``precision``: "bf16" or "fp32", of the training's matrix products."""
    return optimizer_description(config).build(parameter_groups(model, config), config, precision)


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Groups of trainable parameters with their ``names``, ``weight_decay`` and :data:`~pipeline.optim.description.MATRICES`.

    1-D parameters (norms, biases) do not decay, as in DeiT, and neither do, unless ``decay_embeddings``, those that the model lists in
    ``no_weight_decay()``. With ``layer_decay``, there are groups for every layer, whose ``lr_scale`` is that of timm's
    ``param_groups_layer_decay``: ``layer_decay ** (num_layers - 1 - layer)``. Raises UserError: the model has no layers to tell
    apart, or no matrices for an optimizer of matrices.
    """
    # Every VisionModel has these methods; this package knows no models.
    exempt = set() if config.decay_embeddings else model.no_weight_decay()  # type: ignore[operator]
    matrices = optimizer_description(config).matrices(model) - exempt
    if config.layer_decay is not None and model.num_layers < 2:  # type: ignore[operator]
        got = f"got {config.layer_decay:g} for {type(model).__name__}, whose parameters are all of one layer"
        raise UserError(f"optim.layer_decay requires a model of two layers or more, {got}", "set optim.layer_decay=null")
    # Kind: layer (0 without layer-wise decay), whether the optimizer takes them as matrices, whether they decay.
    members: dict[tuple[int, bool, bool], dict[str, nn.Parameter]] = {}
    if config.layer_decay is None:  # these two and in this order, even if one is empty
        members = {(0, False, decays): {} for decays in (True, False)}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            layer = 0 if config.layer_decay is None else model.layer_of(name)  # type: ignore[operator]
            kind = (layer, name in matrices, parameter.ndim > 1 and name not in exempt)
            members.setdefault(kind, {})[name] = parameter
    groups = []
    for (layer, of_matrices, decays), parameters in members.items():
        group: dict[str, Any] = {
            "params": list(parameters.values()),
            "names": list(parameters),
            "weight_decay": config.weight_decay if decays else 0.0,
            MATRICES: of_matrices,
        }
        if config.layer_decay is not None:
            group[LR_SCALE] = config.layer_decay ** (model.num_layers - 1 - layer)  # type: ignore[operator]
        groups.append(group)
    return groups


def describe(model: nn.Module, config: OptimConfig) -> str:
    """The optimizer in a few words, for the log."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    matrices = {name for group in parameter_groups(model, config) if group[MATRICES] for name in group["names"]}
    words = optimizer_description(config).summary(trained, matrices)
    if config.layer_decay is not None:
        words += f", learning rate times {config.layer_decay:g} per layer below the last of {model.num_layers}"
    return words


def learning_rate(step: int, steps_per_epoch: float, epochs: float, global_batch_size: int, config: OptimConfig) -> float:
    """Linear warm-up, then cosine decay to ``min_lr`` (Loshchilov & Hutter, 2017); a pure function of the step.

    As in timm, whose scheduler the papers' code uses, the cosine counts from the first step, so that after a warm-up of w of n
    epochs it goes on at cos(pi w / n); with ``warmup_prefix`` it begins there, at its peak.

    Args:
        step: optimizer steps completed before this one.
        steps_per_epoch: may be fractional: epochs follow each other without a gap.
        epochs: where the cosine ends; from there on the rate is ``min_lr``.
        global_batch_size: the peak is ``lr * global_batch_size / lr_batch_size``, the linear scaling rule (Goyal et al., 2017).
    """
    peak = config.lr * global_batch_size / config.lr_batch_size
    warmup, total = config.warmup_epochs * steps_per_epoch, epochs * steps_per_epoch
    if step < warmup:
        return config.warmup_lr + (peak - config.warmup_lr) * step / warmup
    begin = warmup if config.warmup_prefix else 0.0
    progress = min(1.0, (step - begin) / max(total - begin, 1e-9))  # the bound: a schedule that is all warm-up has no decay
    return config.min_lr + 0.5 * (peak - config.min_lr) * (1 + math.cos(math.pi * progress))
