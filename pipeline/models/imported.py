"""Wrap a classifier of somebody else's code as a model of ours: ``model.name=module:build``, or a name of the entry points ``pervit.models``.

``build`` is a function or a class. It is called with ``num_classes``, with ``image_size`` and ``drop_path`` where it has arguments of
these names, and with ``model.options``; it returns a ``torch.nn.Module``, images (B, 3, S, S) -> scores (B, num_classes). Parameter
names are ``net.`` and the module's.
"""

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from pipeline.errors import UserError, first_line
from pipeline.lazy import import_named
from pipeline.models.timm.classifier import WrappedClassifier, build_wrapped

_REMEDY = "choose another model, or change what it builds"


def build_imported(path: str, name: str, **options: Any) -> WrappedClassifier:
    """The builder of the registry entry of a model of the function ``path``. Raises UserError: there is no such function, it does
    not make a classifier, or one that a run cannot save or continue."""
    model = build_wrapped(WrappedClassifier, partial(call, path), partial(_checked, path), name, **options)
    if changed := model.trial.changed:
        problem = f"{name} changes its buffer {changed[0]} in a forward pass, which would differ between processes"
        raise UserError(problem, _REMEDY)
    return model


def function_of(path: str) -> tuple[Any, dict[str, inspect.Parameter]]:
    """The function that makes a model, and its arguments. Raises a UserError: it cannot be imported, or takes no ``num_classes``."""
    build = import_named("model.name", path, "a function or class that can be imported, as module:build")
    try:
        takes = dict(inspect.signature(build).parameters)
    except (TypeError, ValueError):  # not callable, or not of Python
        takes = {}
    if "num_classes" not in takes and not any(each.kind is each.VAR_KEYWORD for each in takes.values()):
        raise UserError(f"model.name must be a function or class with an argument num_classes, got {path}", "add the argument")
    return build, takes


def call(path: str, name: str, num_classes: int, image_size: int, drop_path: float, options: Mapping[str, Any]) -> nn.Module:
    """A network of the function."""
    build, takes = function_of(path)
    sizes: dict[str, Any] = {"image_size": image_size, "drop_path": drop_path}
    given = {"num_classes": num_classes, **{key: value for key, value in sizes.items() if key in takes}}
    if drop_path and "drop_path" not in takes:
        raise UserError(f"model.drop_path is {drop_path}, but {name} has no argument drop_path", "set model.drop_path=0")
    if twice := sorted(given.keys() & options.keys()):
        raise UserError(f"model.options must not have {twice[0]}, which model.{twice[0]} sets", "remove it")
    try:
        net = build(**given, **options)
    except Exception as error:  # of somebody else's code
        problem = f"{name} cannot be built with model.options {dict(options)} ({type(error).__name__}: {first_line(error)})"
        raise UserError(problem, "correct model.options, or the function") from None
    if not isinstance(net, nn.Module):
        raise UserError(f"model.name must give a torch.nn.Module, got {type(net).__name__} of {name}", _REMEDY)
    return net


def _checked(path: str, name: str, *asked: Any) -> nn.Module:
    """A network that a run can save, and continue with another one of the same function."""
    net, again = call(path, name, *asked), call(path, name, *asked)
    every, state = dict(net.named_parameters(remove_duplicate=False)), net.state_dict()
    tensors = {**every, **dict(net.named_buffers(remove_duplicate=False))}
    known = {key for key, _ in net.named_parameters()} | {key for key, _ in net.named_buffers()}
    for words, found in {
        "has {}, whose shape is not known before a forward pass": [key for key, value in tensors.items() if is_lazy(value)],
        "has {}, which it has under another name too: shared weights are not saved": [
            key for key in tensors if key not in known
        ],
        "has {}, which is not of float32": [key for key, value in every.items() if value.dtype != torch.float32],
        "has {} in its state dict, which is neither parameter nor buffer": [key for key in state if key not in tensors],
        "gives the same {} at each call": [key for key, value in again.named_parameters() if value is every.get(key)],
        "has the BatchNorm {}, whose momentum is None": [
            key for key, norm in net.named_modules() if isinstance(norm, _BatchNorm) and norm.momentum is None
        ],
    }.items():
        if found:
            raise UserError(f"{name} {words.format(found[0])}", _REMEDY)
    if not any(value.requires_grad for value in every.values()):
        raise UserError(f"{name} has no parameters that learn", _REMEDY)
    return net
