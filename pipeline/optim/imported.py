"""Take any class of ``torch.optim.Optimizer`` by its import path, and find out what it keeps by trying it on small parameters.

A checkpoint saves what an optimizer keeps in slices of parameters, so that any number of ranks can load it. That is possible for
tensors of the parameter's shape and for numbers that only count steps; a class that keeps anything else is refused before the run.
"""

import functools
import inspect
from contextlib import ExitStack
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from pipeline.config import OptimConfig
from pipeline.errors import UserError, first_line
from pipeline.lazy import import_named
from pipeline.optim.description import MATRICES, Group, OptimizerDescription, StateNames

_SHAPES = (((6, 4), (3, 5)), ((7,),))  # of the parameters that a class is tried on, by group
_STEPS = 3  # before its state is looked at; one more follows
_SAME = 1e-4  # relative distance of weights: two orders of summation differ less, a norm of another tensor more
_REMEDY = "choose another optimizer"


class ImportedOptimizer(OptimizerDescription):
    """A class from another package, constructed with ``lr`` and ``optim.options``; ``decays``: whether it takes
    ``weight_decay``. Raises UserError: it cannot be imported, is not an optimizer, refuses its options, or keeps what a
    checkpoint cannot hold."""

    def __init__(self, config: OptimConfig) -> None:
        self._config, found = config, import_named("optim.name", config.name, "a class that can be imported, as module:Class")
        if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
            problem = f"optim.name must be a subclass of torch.optim.Optimizer, got {config.name} ({type(found).__name__})"
            raise UserError(problem, "name a class, such as torch.optim:NAdam")
        self._class: Any = found
        self.title = found.__name__
        parameters = inspect.signature(self._class).parameters.values()
        self.decays = any(p.name == "weight_decay" or p.kind == p.VAR_KEYWORD for p in parameters)
        with ExitStack() as stack:  # a plan traces with tensors that are fake
            stack.enter_context(_disable_current_modes())
            stack.enter_context(torch.device("cpu"))
            stack.enter_context(torch.random.fork_rng(devices=[]))
            self._try_out()
        # PyTorch's optimizers read and write about twice as often as a fused kernel, which needs weights, gradients and state once.
        self.passes = 2 * (3 + 2 * len(self.kept.tensors))

    def _try_out(self) -> None:
        """Take steps; find out what is kept, whether a resumed run would go on alike, and whether slices of parameters will do."""
        trial = _Trial(self, self._config)
        try:
            for step in range(_STEPS):
                trial.step(step)
        except Exception as error:
            problem = f"cannot take a step without a closure on dense gradients ({type(error).__name__}: {first_line(error)})"
            raise UserError(f"optim.name {self._config.name} {problem}", _REMEDY) from None
        self.kept = self._state_names(trial)
        resumed = _Trial(self, self._config)
        resumed.step(0)
        resumed.take_over(trial, self.kept)
        for stepping in (trial, resumed):
            stepping.step(_STEPS)
        if not torch.equal(trial.weights(), resumed.weights()):
            raise self._refusal("something outside of its state, or draws random numbers")
        self.takes_slices = not issubclass(self._class, torch.optim.Adagrad)  # DeepSpeed builds it anew, without the groups
        try:
            sliced = _Trial(self, self._config, flat=True)
            for step in range(_STEPS + 1):
                sliced.step(step)
            distance = (sliced.weights() - trial.weights()).norm()
            self.takes_slices &= bool(distance <= _SAME * trial.weights().norm())
        except Exception:  # it needs matrices, for example
            self.takes_slices = False

    def build(self, groups: list[dict[str, Any]], config: OptimConfig, precision: str) -> torch.optim.Optimizer:
        try:
            return self._class(groups, lr=config.warmup_lr, **config.options)
        except Exception as error:  # whatever a class of somebody else raises
            given = f"parameter groups, lr and optim.options {config.options}"
            why = f"{type(error).__name__}: {first_line(error)}"
            problem = f"optim.name {config.name} cannot be constructed with {given} ({why})"
            raise UserError(problem, "correct optim.options, or choose another optimizer") from None

    def temporaries(self, group: Group, size: float, split: bool, precision: str) -> float:
        return size  # PyTorch's documentation of foreach: about one copy of the parameters

    def _state_names(self, trial: "_Trial") -> StateNames:
        """What it keeps for each parameter. Raises UserError: something else than tensors of a parameter's shape and numbers
        that are equal for a group's parameters."""
        found = []
        for parameter, first in ((parameter, group[0]) for group in trial.tensors for parameter in group):
            state, of_first = trial.optimizer.state[parameter], trial.optimizer.state[first]
            tensors, scalars = [], []
            for key, value in ((key, value) for key, value in state.items() if value is not None):
                if not isinstance(key, str) or "/" in key:
                    raise self._refusal(f"state under the key {key!r}")
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    tensors.append(key)
                elif isinstance(value, Tensor) and value.ndim or not isinstance(value, Tensor | int | float):
                    shape = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"({type(value).__name__})"
                    raise self._refusal(f"{key!r} {shape} for a parameter of shape {tuple(parameter.shape)}")
                elif float(value) != float(of_first[key]):
                    raise self._refusal(f"a number of each parameter's own, {key!r}")
                else:
                    scalars.append(key)
            found.append(StateNames(tuple(tensors), tuple(scalars)))
        if len(set(found)) > 1:
            raise self._refusal("other state for one parameter than for another")
        return found[0]

    def _refusal(self, what: str) -> UserError:
        must = f"optim.name {self._config.name} must keep tensors of each parameter's shape and counts of steps only"
        return UserError(f"{must}, got {what}: no checkpoint could be resumed with it", _REMEDY)


class _Trial:
    """An optimizer of small parameters with given gradients, which steps as a run does. ``flat``: hand it a flat tensor for
    each group instead of its parameters, one group at a time, as ZeRO does."""

    def __init__(self, description: ImportedOptimizer, config: OptimConfig, flat: bool = False) -> None:
        self._flat, generator = flat, torch.Generator().manual_seed(0)
        self.tensors = [[nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes] for shapes in _SHAPES]
        names = [[str(shape) for shape in shapes] for shapes in _SHAPES]
        groups = [{"params": p, "names": n, "weight_decay": 0.1 / len(p), MATRICES: False} for p, n in zip(self.tensors, names)]
        self.optimizer = description.build(groups, config, "fp32")
        if flat:
            self.tensors = [[nn.Parameter(_flattened(group))] for group in self.tensors]

    def step(self, number: int) -> None:
        """Take a step with the gradients and the learning rate of that number."""
        generator, groups = torch.Generator().manual_seed(1 + number), self.optimizer.param_groups
        for group, shapes, tensors in zip(groups, _SHAPES, self.tensors):
            group["lr"] = 0.1 / (1 + number)
            gradients = [torch.randn(shape, generator=generator) for shape in shapes]
            for tensor, gradient in zip(tensors, [_flattened(gradients)] if self._flat else gradients):
                tensor.grad = gradient
        every = range(len(groups))
        for turn in [[number] for number in every] if self._flat else [every]:
            for number, group in enumerate(groups):
                group["params"] = self.tensors[number] if number in turn else []
            self.optimizer.step()

    @torch.no_grad()
    def take_over(self, other: "_Trial", names: StateNames) -> None:
        """Copy weights and state from another trial, as a resumed run does."""
        for tensor, source in zip(sum(self.tensors, []), sum(other.tensors, [])):
            tensor.copy_(source)
            state, saved = self.optimizer.state[tensor], other.optimizer.state[source]
            for name in (*names.tensors, *names.scalars):
                state[name] = state[name].copy_(saved[name]) if isinstance(state[name], Tensor) else saved[name]

    def weights(self) -> Tensor:
        """All weights, (n,)."""
        return _flattened(sum(self.tensors, []))


def imported_optimizer(config: OptimConfig) -> ImportedOptimizer:
    """The description of ``optim.name=module:Class``, which is tried out once for each set of options."""
    described = _described(config.name, yaml.safe_dump(config.options))
    if config.weight_decay and not described.decays:
        problem = f"optim.weight_decay must be 0 with optim.name={config.name}, which has none, got {config.weight_decay:g}"
        raise UserError(problem, "set optim.weight_decay=0")
    return described


@functools.cache
def _described(name: str, options: str) -> ImportedOptimizer:
    return ImportedOptimizer(OptimConfig(name=name, options=yaml.safe_load(options)))


def _flattened(tensors: list[Any]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
