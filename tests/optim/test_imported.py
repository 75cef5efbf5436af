"""Any class of ``torch.optim.Optimizer`` by ``module:Class``: what is found out about it, and which are refused."""

from __future__ import annotations

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from optim.optimizers_program import small_model
from pipeline.config import Config, OptimConfig, config_from_dict
from pipeline.config.train_sections import BUILT_IN_OPTIMIZERS
from pipeline.errors import UserError
from pipeline.optim.build import build_optimizer, optimizer_description
from pipeline.optim.description import MATRICES, StateNames
from pipeline.optim.engine import zero_stage
from support.ranks import run_forked


def config(name: str, zero: int = 1, **optim: object) -> Config:
    return config_from_dict({"train": {"zero_stage": zero}, "optim": {"name": name, **optim}}, "the test")


@pytest.mark.parametrize(
    ("name", "options", "tensors", "scalars", "takes_slices"),
    [
        ("torch.optim:NAdam", {}, ("exp_avg", "exp_avg_sq"), ("step", "mu_product"), True),
        ("torch.optim:SGD", {"momentum": 0.9}, ("momentum_buffer",), (), True),
        ("torch.optim:SGD", {}, (), (), True),
        ("torch.optim:AdamW", {"amsgrad": True}, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), ("step",), True),
        ("torch.optim:Adagrad", {}, ("sum",), ("step",), False),
        ("support.lion:Lion", {"betas": [0.95, 0.98]}, ("momentum",), (), True),
        ("support.lion:Normalized", {}, (), (), False),
    ],
)
def test_what_a_class_keeps_is_found_out(name: str, options: dict, tensors: tuple, scalars: tuple, takes_slices: bool) -> None:
    """Guards against state that no checkpoint has, and against a norm of a slice where ZeRO hands out slices."""
    asked = config(name, options=options)
    with FakeTensorMode():  # as a plan asks
        found = optimizer_description(asked.optim)
    assert found.state({MATRICES: False}) == StateNames(tensors, scalars) and found.takes_slices == takes_slices
    assert found.title == name.partition(":")[2]
    if takes_slices:
        assert zero_stage(asked, 2) == 1
    else:
        with pytest.raises(UserError, match=f"train.zero_stage must be 0 on several processes with optim.name={name}"):
            zero_stage(asked, 2)
    assert zero_stage(asked, 1) == 0


def test_options_and_decay_reach_the_class() -> None:
    """Guards against a class that trains with other numbers than the config's, or that loses its own defaults."""
    model = small_model()
    optimizer = build_optimizer(model, config("torch.optim:NAdam", options={"momentum_decay": 0.1}, weight_decay=0.3).optim)
    decayed, plain = optimizer.param_groups
    assert isinstance(optimizer, torch.optim.NAdam) and decayed["momentum_decay"] == 0.1 and decayed["eps"] == 1e-8
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert decayed["betas"] == (0.9, 0.999)


@pytest.mark.parametrize(
    ("name", "optim", "sentence"),
    [
        (
            "torch.optim:LBFGS",
            {},
            "optim.name torch.optim:LBFGS cannot be constructed with parameter groups, lr and optim.options {} (ValueError: LBFGS "
            "doesn't support per-parameter options (parameter groups)): correct optim.options, or choose another optimizer.",
        ),
        (
            "torch.optim:Adafactor",
            {},
            "optim.name torch.optim:Adafactor must keep tensors of each parameter's shape and counts of steps only, got 'row_var' of "
            "shape (6, 1) for a parameter of shape (6, 4): no checkpoint could be resumed with it: choose another optimizer.",
        ),
        (
            "torch.optim:SparseAdam",
            {},
            "cannot take a step without a closure on dense gradients (RuntimeError: SparseAdam does not",
        ),
        ("torch.optim:NAdam", {"options": {"betos": 1}}, "got an unexpected keyword argument 'betos'): correct optim.options"),
        ("torch.optim:Rprop", {}, "optim.weight_decay must be 0 with optim.name=torch.optim:Rprop, which has none, got 0.05"),
        ("support.lion:Counting", {}, "got something outside of its state, or draws random numbers: no checkpoint could be"),
        (
            "torch.optim:Nodam",
            {},
            "got torch.optim:Nodam (AttributeError: module 'torch.optim' has no attribute 'Nodam'): correct it",
        ),
        ("no.such:Lion", {}, "got no.such:Lion (ModuleNotFoundError: No module named 'no'): correct it, or put the folder"),
        ("torch.nn:Linear", {}, "optim.name must be a subclass of torch.optim.Optimizer, got torch.nn:Linear (type)"),
    ],
)
def test_a_class_that_no_run_can_be_resumed_with_is_refused(name: str, optim: dict, sentence: str) -> None:
    """Guards against a run that trains to its end and then cannot be resumed, and against a traceback of somebody else's code."""
    with pytest.raises(UserError) as error:
        optimizer_description(config(name, **optim).optim)
    assert sentence in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "kept"), [("torch.optim:NAdam", 2), ("support.lion:Lion", 1)])
def test_a_plan_counts_what_a_class_keeps(name: str, kept: int) -> None:
    """Guards against a plan that knows AdamW alone: a checkpoint has the weights and what the class keeps for each, in float32."""
    options = ("--config", "deit_t", "--gpus-per-node", 2, "--micro-batch", 128, f"optim.name={name}")
    said = run_forked("pipeline.plan", *options).stdout
    found = re.search(r"checkpoint +([\d.]+) MB", said)
    assert found and float(found[1]) == pytest.approx((1 + kept) * 4 * 5.717, rel=0.01)  # millions of parameters


@pytest.mark.parametrize("name", BUILT_IN_OPTIMIZERS)
def test_built_in_descriptions_are_what_is_kept(name: str) -> None:
    """Guards against a description that says something else than its optimizer does."""
    model, asked = small_model(), OptimConfig(name=name)
    optimizer = build_optimizer(model, asked)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for group in optimizer.param_groups:
        names = optimizer_description(asked).state(group)
        for parameter in group["params"]:
            shapes = {key: value.shape for key, value in optimizer.state[parameter].items()}
            assert shapes == {key: parameter.shape for key in names.tensors} | {key: torch.Size() for key in names.scalars}
