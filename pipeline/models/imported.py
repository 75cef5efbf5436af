"""Wrap a classifier of somebody else's code as a model of ours: ``model.name=module:build``, or a name of the entry points ``pervit.models``.

``build`` is a function or a class. It is called with ``num_classes``, with ``image_size`` and ``drop_path`` where it has arguments of
these names, and with ``model.options``; it returns a ``torch.nn.Module``, images (B, 3, S, S) -> scores (B, num_classes). Parameter
names are ``net.`` and the module's.
"""

from __future__ import annotations

import inspect
import json
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from pipeline.errors import UserError, first_line
from pipeline.lazy import import_named
from pipeline.models.entry import ModelEntry, import_path
from pipeline.models.timm.classifier import TimmSwitches, WrappedClassifier
from pipeline.models.timm.network import Trial, observe

_MODULE = "choose another model, or change what it builds"


def imported_entry(name: str, path: str) -> ModelEntry:
    """The registry entry of the model ``name``, which ``path``, a ``module:build``, makes."""
    build = partial(build_imported, name, path)
    return ModelEntry(name=name, build=build, description=f"a model of {path}", paper="", switches=TimmSwitches)


def build_imported(
    name: str,
    path: str,
    switches: TimmSwitches,
    num_classes: int,
    image_size: int,
    drop_path: float,
    activation_checkpointing: bool,
) -> WrappedClassifier:
    """The builder of a registry entry.

    Raises:
        UserError: there is no such function, it does not make a classifier, or one that a run cannot save or continue.
    """
    options = dict(switches.model_extra or {})
    trial = _tried(name, path, num_classes, image_size, drop_path, json.dumps(options, sort_keys=True))
    if drop_path and not trial.branches:
        raise UserError(f"model.drop_path is {drop_path}, but {name} has no stochastic depth", "set model.drop_path=0")
    default = torch.get_default_device()
    with torch.device(trial.device if default.type == "meta" else default):
        net = _called(name, path, num_classes, image_size, drop_path, options)
    return WrappedClassifier(name, net, trial, activation_checkpointing, switches, _heads(net, num_classes))


def options_of(name: str) -> dict[str, Any]:
    """What ``model.options`` may have for a model, with the defaults (``inspect.Parameter.empty``: none)."""
    takes = _builder(import_path(name) or name)[1]
    return {key: each.default for key, each in takes.items() if key not in ("num_classes", "image_size", "drop_path")}


def _builder(path: str) -> tuple[Any, dict[str, inspect.Parameter]]:
    """The function of ``module:build``, and its arguments."""
    build = import_named("model.name", path, "a function or class that can be imported, as module:build")
    try:
        return build, dict(inspect.signature(build).parameters)
    except (TypeError, ValueError):  # not callable, or not of Python
        return build, {}


def _called(name: str, path: str, num_classes: int, image_size: int, drop_path: float, options: dict[str, Any]) -> nn.Module:
    build, takes = _builder(path)
    if "num_classes" not in takes and not any(each.kind is each.VAR_KEYWORD for each in takes.values()):
        raise UserError(f"model.name must be a function or class with an argument num_classes, got {name}", "add the argument")
    sizes: dict[str, Any] = {"image_size": image_size, "drop_path": drop_path}
    given = {"num_classes": num_classes, **{key: value for key, value in sizes.items() if key in takes}}
    if drop_path and "drop_path" not in takes:
        raise UserError(f"model.drop_path is {drop_path}, but {name} has no argument drop_path", "set model.drop_path=0")
    if twice := sorted(given.keys() & options.keys()):
        raise UserError(f"model.options must not have {twice[0]}, which model.{twice[0]} sets", "remove it")
    try:
        net = build(**given, **options)
    except Exception as error:  # of somebody else's code
        raise UserError(
            f"{name} cannot be built with model.options {options} ({type(error).__name__}: {first_line(error)})",
            "correct model.options, or the function",
        ) from None
    if not isinstance(net, nn.Module):
        raise UserError(f"model.name must give a torch.nn.Module, got {type(net).__name__} of {name}", _MODULE)
    return net


@lru_cache(maxsize=32)  # a start builds a model several times
def _tried(name: str, path: str, num_classes: int, image_size: int, drop_path: float, options: str) -> Trial:
    """Build the network, see that a run can save and continue it, and give it two blank images."""
    built: list[tuple[nn.Module, dict[str, int]]] = []

    def build() -> nn.Module:
        net, again = (_called(name, path, num_classes, image_size, drop_path, json.loads(options)) for _ in range(2))
        if problem := _misfit(net, again):
            raise UserError(f"{name} {problem}", _MODULE)
        built.append((net, _versions(net)))
        return net

    trial = observe(build, name, num_classes, image_size, json.loads(options))
    net, before = built[-1]
    changed = [key for key, version in _versions(net).items() if before.get(key) != version]
    if changed:
        raise UserError(
            f"{name} changes its buffer {changed[0]} in a forward pass, which would differ between processes", _MODULE
        )
    return trial


def _misfit(net: nn.Module, again: nn.Module) -> str | None:
    """What keeps a run from saving a network, or from continuing with another one of the same function: the end of a sentence."""
    every, state = dict(net.named_parameters(remove_duplicate=False)), net.state_dict()
    buffers = dict(net.named_buffers(remove_duplicate=False))
    known = {key for key, _ in net.named_parameters()} | {key for key, _ in net.named_buffers()}
    tensors = {**every, **buffers}
    if lazy := [key for key, value in tensors.items() if is_lazy(value)]:
        return f"has {lazy[0]}, whose shape is not known before a forward pass"
    shapes = {key: tuple(value.shape) for key, value in again.state_dict().items() if isinstance(value, torch.Tensor)}
    for found, words in (
        ([key for key in every if "/" in key], "has the parameter {}, whose name has a slash"),
        ([key for key in tensors if key not in known], "has {}, which it has under another name too: shared weights are not saved"),
        ([key for key, value in every.items() if value.dtype != torch.float32], "has {}, which is not of float32"),
        ([key for key, value in buffers.items() if value.is_complex() or value.is_quantized], "has the buffer {}, of no real numbers"),
        ([key for key in state if key not in tensors], "has {} in its state dict, which is neither parameter nor buffer"),
        ([key for key, value in again.named_parameters() if value is every.get(key)], "gives the same {} at each call"),
        ([key for key, value in state.items() if key in tensors and shapes.get(key) != tuple(value.shape)], "gives another {} at each call"),
        ([key for key, norm in net.named_modules() if _BatchNorm in type(norm).__mro__ and norm.momentum is None],
         "has the BatchNorm {}, whose momentum is None"),
    ):  # fmt: skip
        if found:
            return words.format(found[0])
    return None if any(value.requires_grad for value in every.values()) else "has no parameters that learn"


def _versions(net: nn.Module) -> dict[str, int]:
    """How often each buffer, but those of BatchNorm, was changed."""
    norms = {id(buffer) for norm in net.modules() if isinstance(norm, _BatchNorm) for buffer in norm.buffers()}
    return {key: hash((id(buffer), buffer._version)) for key, buffer in net.named_buffers() if id(buffer) not in norms}


def _heads(net: nn.Module, num_classes: int) -> list[str]:
    """The name of the classifier: what ``get_classifier`` gives, as in timm's models, else the last linear layer of so many outputs."""
    try:
        found: object = net.get_classifier()  # type: ignore[operator]
    except Exception:  # it has no such method, or another one
        found = None
    names = [key for key, module in net.named_modules() if module is found]
    linear = [key for key, each in net.named_modules() if isinstance(each, nn.Linear) and each.out_features == num_classes]
    return (names or linear)[-1:]
