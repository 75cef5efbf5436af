"""Take any class of ``torch.optim.Optimizer`` by its import path, and find out what it keeps by trying it on small parameters.

A checkpoint saves what an optimizer keeps in slices of parameters, so that any number of ranks can load it. That is possible for
tensors of the parameter's shape and for numbers that only count steps; a class that keeps anything else is refused before the run.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from pipeline.config import OptimConfig
from pipeline.errors import UserError
from pipeline.optim.description import MATRICES, Group, OptimizerDescription, StateNames

_SHAPES = {"a": (6, 4), "b": (3, 5), "c": (7,)}  # of the parameters that a class is tried on
_GROUPS = (("a", "b"), ("c",))
_STEPS = 3  # before the state is looked at, and another after it was restored
_SAME = 1e-4  # relative distance of weights: two orders of summation differ less, a norm of another tensor more


class ImportedOptimizer(OptimizerDescription):
    """A class from another package: constructed with ``lr``, ``weight_decay`` and ``optim.options``, what it keeps found by trial.

    Args:
        config: with ``name`` as ``module:Class``.

    Attributes:
        decays: whether it takes ``weight_decay``.

    Raises:
        UserError: it cannot be imported, is not an optimizer, refuses its options, or keeps what a checkpoint cannot hold.
    """

    def __init__(self, config: OptimConfig) -> None:
        self._key, self._class, self._options = f"optim.name {config.name}", _imported(config.name), config.options
        self.title = self._class.__name__
        parameters = inspect.signature(self._class).parameters.values()
        self.decays = any(p.name == "weight_decay" or p.kind == p.VAR_KEYWORD for p in parameters)
        with ExitStack() as stack:  # a plan traces with tensors that are fake
            stack.enter_context(_disable_current_modes())
            stack.enter_context(torch.device("cpu"))
            stack.enter_context(torch.random.fork_rng(devices=[]))
            self._names, self.takes_slices = self._tried(functools.partial(self.build, config=config))
        # PyTorch's optimizers read and write about twice as often as a fused kernel, which needs weights, gradients and state once.
        self.passes = 2 * (3 + 2 * len(self._names.tensors))

    def build(self, groups: list[dict[str, Any]], config: OptimConfig) -> torch.optim.Optimizer:
        try:
            return self._class(groups, lr=config.warmup_lr, **self._options)
        except Exception as error:  # whatever a class of somebody else raises
            raise UserError(
                f"{self._key} cannot be constructed with parameter groups, lr and optim.options {self._options} ({_reason(error)})",
                "correct optim.options, or choose another optimizer",
            ) from None

    def state(self, group: Group) -> StateNames:
        return self._names

    def temporaries(self, group: Group, size: float, split: bool) -> float:
        return size  # PyTorch's documentation of foreach: about one copy of the parameters

    def _tried(self, build: Callable[..., torch.optim.Optimizer]) -> tuple[StateNames, bool]:
        """Take steps on small parameters.

        Returns:
            What the optimizer keeps for a parameter, and whether it steps on slices as on whole parameters.
        """
        whole = _Trial(build)
        try:
            for step in range(_STEPS):
                whole.step(step)
            names = self._state_names(whole)
            restored = _Trial(build)
            restored.step(0)
            restored.take_over(whole, names)
            for trial in (whole, restored):
                trial.step(_STEPS)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"{self._key} cannot take a step without a closure on dense gradients ({_reason(error)})",
                "choose another optimizer",
            ) from None
        if not torch.equal(whole.values(), restored.values()):
            raise self._refusal("something outside of its state, or draws random numbers")
        if issubclass(self._class, torch.optim.Adagrad):  # DeepSpeed constructs it anew, without the parameter groups
            return names, False
        try:
            sliced = _Trial(build, flat=True)
            for step in range(_STEPS + 1):
                sliced.step(step)
            takes_slices = bool((sliced.values() - whole.values()).norm() <= _SAME * whole.values().norm())
        except Exception:  # it has its state from its constructor, or needs matrices
            takes_slices = False
        return names, takes_slices

    def _state_names(self, trial: _Trial) -> StateNames:
        found: list[StateNames] = []
        for names, group in zip(_GROUPS, trial.parameters):
            for name, parameter in zip(names, group):
                tensors, scalars = [], []
                for key, value in trial.optimizer.state[parameter].items():
                    if value is None:
                        continue
                    if not isinstance(key, str) or "/" in key:
                        raise self._refusal(f"state under the key {key!r}")
                    if isinstance(value, Tensor) and value.shape == parameter.shape:
                        tensors.append(key)
                    elif isinstance(value, int | float) or (isinstance(value, Tensor) and value.ndim == 0):
                        scalars.append(key)
                        if float(value) != float(trial.optimizer.state[group[0]][key]):
                            raise self._refusal(f"a number of each parameter's own, {key!r}")
                    else:
                        shape = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"({type(value).__name__})"
                        raise self._refusal(f"{key!r} {shape} for a parameter of shape {_SHAPES[name]}")
                found.append(StateNames(tuple(tensors), tuple(scalars)))
        if any(names != found[0] for names in found):
            raise self._refusal("other state for one parameter than for another")
        return found[0]

    def _refusal(self, what: str) -> UserError:
        return UserError(
            f"{self._key} must keep tensors of each parameter's shape and counts of steps only, got {what}: no checkpoint could "
            "be resumed with it",
            "choose another optimizer",
        )


class _Trial:
    """An optimizer of small parameters with given gradients, which steps as a run does.

    Args:
        build: gets the parameter groups.
        flat: hand it a flat tensor for each group instead of its parameters, one group at a time, as ZeRO does.
    """

    def __init__(self, build: Callable[..., torch.optim.Optimizer], flat: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        whole = [[nn.Parameter(torch.randn(_SHAPES[name], generator=generator)) for name in names] for names in _GROUPS]
        groups = [
            {"params": list(group), "names": list(names), "weight_decay": decay, MATRICES: False}
            for group, names, decay in zip(whole, _GROUPS, (0.1, 0.0))
        ]
        self.optimizer = build(groups)
        self.parameters = [[nn.Parameter(_flattened(group))] for group in whole] if flat else whole
        self._flat = flat

    def step(self, number: int) -> None:
        """Take a step with the gradients and the learning rate of that number."""
        generator = torch.Generator().manual_seed(1 + number)
        for names, tensors in zip(_GROUPS, self.parameters):
            gradients = [torch.randn(_SHAPES[name], generator=generator) for name in names]
            for tensor, gradient in zip(tensors, [_flattened(gradients)] if self._flat else gradients):
                tensor.grad = gradient
        groups = self.optimizer.param_groups
        for group in groups:
            group["lr"] = 0.1 / (1 + number)
            if self._flat:
                group["params"] = []
        if not self._flat:
            self.optimizer.step()
            return
        for group, tensors in zip(groups, self.parameters):
            group["params"] = tensors
            self.optimizer.step()
            group["params"] = []

    @torch.no_grad()
    def take_over(self, other: _Trial, names: StateNames) -> None:
        """Copy weights and state from another trial, as a resumed run does."""
        for own, theirs in zip(self.parameters, other.parameters):
            for parameter, source in zip(own, theirs):
                parameter.copy_(source)
                state, saved = self.optimizer.state[parameter], other.optimizer.state[source]
                for name in (*names.tensors, *names.scalars):
                    if isinstance(state[name], Tensor):
                        state[name].copy_(saved[name])
                    else:
                        state[name] = saved[name]

    def values(self) -> Tensor:
        """All weights, (n,)."""
        return _flattened([parameter for group in self.parameters for parameter in group])


def imported_optimizer(config: OptimConfig) -> ImportedOptimizer:
    """The description of ``optim.name=module:Class``, which is tried out once for each set of options."""
    described = _described(config.name, yaml.safe_dump(config.options))
    if config.weight_decay and not described.decays:
        raise UserError(
            f"optim.weight_decay must be 0 with optim.name={config.name}, which has none, got {config.weight_decay:g}",
            "set optim.weight_decay=0",
        )
    return described


@functools.cache
def _described(name: str, options: str) -> ImportedOptimizer:
    return ImportedOptimizer(OptimConfig(name=name, options=yaml.safe_load(options)))


def _imported(name: str) -> Any:
    module_name, _, class_name = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in class_name.split("."):
            found = getattr(found, part)
    except Exception as error:  # whatever a module of somebody else raises
        raise UserError(
            f"optim.name must be a class that can be imported, as module:Class, got {name} ({_reason(error)})",
            "correct it, or put the folder of the module on PYTHONPATH",
        ) from None
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise UserError(
            f"optim.name must be a subclass of torch.optim.Optimizer, got {name} ({type(found).__name__})",
            "name a class, such as torch.optim:NAdam",
        )
    return found


def _flattened(tensors: list[Any]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _reason(error: Exception) -> str:
    """An error of somebody else's class, in one line."""
    return f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".: ")
