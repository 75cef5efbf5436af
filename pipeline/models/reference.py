"""Weights under the authors' names: each family lists the names once, and the list is read in both directions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from pipeline.errors import UserError

NamePairs = Sequence[tuple[str, str]]


def load_reference_state_dict(model: nn.Module, state_dict: Mapping[str, Tensor]) -> nn.Module:
    """Load the state dict of the authors' published code: rename its keys, then load strictly.

    Args:
        model: from ``create_model``; lists the names in ``reference_names``.
        state_dict: the authors' key names -> tensors.

    Returns:
        ``model``.

    Raises:
        UserError: a name is missing, unknown or given twice, or a shape differs.
    """
    tables, pairs = model.reference_tables().keys(), model.reference_names
    renamed: dict[str, Tensor] = {}
    for key, value in state_dict.items():
        if key in tables:
            continue
        name = _renamed(key, pairs)
        if name in renamed:
            raise UserError(f"reference state dict: two keys both mean {name!r} (the second is {key!r}): remove one of them.")
        renamed[name] = value
    own = model.state_dict()
    missing, unknown = sorted(own.keys() - renamed.keys()), sorted(renamed.keys() - own.keys())
    if missing or unknown:
        raise UserError(
            f"reference state dict does not fit {type(model).__name__}: {len(missing)} names are missing {missing[:3]} and "
            f"{len(unknown)} are unknown {unknown[:3]}, 0 of each needed: pass the authors' state dict of the same model "
            f"(of a training checkpoint, its 'model' entry)."
        )
    for name, value in renamed.items():
        if value.shape != own[name].shape:
            raise UserError(
                f"reference state dict: {name} has shape {tuple(value.shape)}, the model needs {tuple(own[name].shape)}: "
                f"create the model with the size and num_classes that the weights were trained with."
            )
    model.load_state_dict(renamed, strict=True)
    return model


def reference_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The model's weights as the authors' published code names them; :func:`load_reference_state_dict` reads them back.

    Args:
        model: from ``create_model``, with its weights whole (not sharded by ZeRO-3).

    Returns:
        The authors' key names -> tensors, all of those that the authors' own state dict has, in the same shapes. Parameters and
        BatchNorm's statistics share the model's memory, as in ``state_dict()``; fixed tables (PosMLP's) are computed.

    Raises:
        UserError: the model has a switch set for which no layout of the authors' is known.
    """
    switch = model.unpublished_switch()
    if switch is not None:
        setting = getattr(model.switches, switch)
        raise UserError(
            f"model.switches.{switch} is {setting!r}, for which the authors' code has no parameters that this {type(model).__name__} "
            f"could be exported as: export it under this project's own names (model.state_dict())."
        )
    own = model.state_dict()
    return {theirs: own[name] for theirs, name in authors_names(model).items()} | model.reference_tables()


def authors_names(model: nn.Module) -> dict[str, str]:
    """The authors' name of each of the model's weights -> our name; of an ablation that they do not have, as if they had."""
    pairs = [(own, authors) for authors, own in model.reference_names]
    return {_renamed(name, pairs): name for name in model.state_dict()}


def _renamed(name: str, pairs: NamePairs) -> str:
    """``name`` by the first pair whose first half it is or begins with; unchanged where there is none."""
    for before, after in pairs:
        # A half that ends in a dot stands for all names below; any other for itself.
        pattern = re.escape(before).replace(r"\*", r"(\d+)") + ("" if before.endswith(".") else "$")
        if found := re.match(pattern, name):
            return after.replace("*", "{}").format(*found.groups()) + name[found.end() :]
    return name
