"""Parameter groups: which parameters decay, at which fraction of the learning rate, and which are Muon's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from pipeline.config import OptimConfig
from pipeline.errors import UserError

LR_SCALE = "lr_scale"  # key of a group: fraction of the schedule's learning rate; without it, all of it
MATRICES = "matrices"  # key of a group: whether Muon updates it


@dataclass(frozen=True)
class _Kind:
    """What the parameters of a group have in common."""

    layer: int  # 0 without layer-wise decay
    matrices: bool  # Muon's
    decays: bool


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Groups of trainable parameters with ``weight_decay``.

    1-D parameters (norms, biases) do not decay, as in DeiT, and neither do, unless ``decay_embeddings``, those that the model lists in
    ``no_weight_decay()``. With ``layer_decay``, there are groups for every layer, whose ``lr_scale`` is that of timm's
    ``param_groups_layer_decay``: ``layer_decay ** (num_layers - 1 - layer)``. LAMB's and Muon's groups also have the ``names`` of
    their parameters; ``matrices`` is true for those that Muon updates.

    Raises:
        UserError: the model has no layers to tell apart, or nothing for Muon.
    """
    # Every VisionModel has these methods; this package knows no models.
    exempt = set() if config.decay_embeddings else model.no_weight_decay()  # type: ignore[operator]
    muons = set(_hidden_matrices(model)) - exempt if config.name == "muon" else set()
    if config.name == "muon" and not muons:
        raise UserError(
            f"optim.name is muon, but {_name(model)} has no weight matrices in its blocks, at least one needed",
            "set optim.name=adamw",
        )
    if config.layer_decay is not None and model.num_layers < 2:  # type: ignore[operator]
        raise UserError(
            f"optim.layer_decay is {config.layer_decay:g}, but all parameters of {_name(model)} are of one layer, two needed",
            "set optim.layer_decay=null",
        )
    members: dict[_Kind, dict[str, nn.Parameter]] = {}
    if config.layer_decay is None:  # these two and in this order, even if one is empty: what AdamW of this project always had
        members = {_Kind(0, False, decays): {} for decays in (True, False)}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            layer = 0 if config.layer_decay is None else model.layer_of(name)  # type: ignore[operator]
            kind = _Kind(layer, name in muons, parameter.ndim > 1 and name not in exempt)
            members.setdefault(kind, {})[name] = parameter
    groups = []
    for kind, parameters in members.items():
        group: dict[str, Any] = {
            "params": list(parameters.values()),
            "weight_decay": config.weight_decay if kind.decays else 0.0,
        }
        if config.layer_decay is not None:
            group[LR_SCALE] = config.layer_decay ** (model.num_layers - 1 - kind.layer)  # type: ignore[operator]
        if config.name != "adamw":
            group |= {"names": list(parameters), MATRICES: kind.matrices}
        groups.append(group)
    return groups


def describe(model: nn.Module, config: OptimConfig) -> str:
    """The optimizer in a few words, for the log."""
    words = {"adamw": "AdamW", "lamb": "LAMB", "muon": "Muon"}[config.name]
    if config.name == "muon":
        weights = dict(model.named_parameters())
        names = [name for group in parameter_groups(model, config) if group[MATRICES] for name in group["names"]]
        share = sum(weights[name].numel() for name in names) / sum(p.numel() for p in weights.values() if p.requires_grad)
        words += f" for {len(names)} matrices ({share:.0%} of the parameters) and AdamW for the rest"
    if config.layer_decay is not None:
        words += f", learning rate times {config.layer_decay:g} per layer below the last of {model.num_layers}"
    return words


def _hidden_matrices(model: nn.Module) -> Iterator[str]:
    """Names of the weights of linear layers between stem and classifier, for which Muon is made (Jordan et al., 2024)."""
    last = model.num_layers - 1  # type: ignore[operator]
    for module_name, module in model.named_modules():
        name = f"{module_name}.weight"
        if isinstance(module, nn.Linear) and module.weight.requires_grad and 0 < model.layer_of(name) < last:  # type: ignore[operator]
            yield name


def _name(model: nn.Module) -> str:
    return type(model).__name__
