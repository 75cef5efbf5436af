"""The published recipes as commands, and what their scripts make of them: learning rates and arguments of the optimizer."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .checkouts import Script

POINTS = 40


@dataclass(frozen=True)
class Recipe:
    """A run that a repository documents.

    Attributes:
        script: of the repository.
        processes: that the README's command starts.
        options: of the README's command, those that change the optimization.
        yaml: PosMLP's configuration file, which gives the defaults.
        log: PosMLP's log of the run.
    """

    script: str
    processes: int
    options: str
    yaml: str = ""
    log: str = ""


RECIPES = {
    "pervit": {
        "pervit_t": Recipe("main.py", 8, "--batch-size 128 --weight-decay 0.03 --warmup-epochs 5 --drop-path 0.0"),
        "pervit_s": Recipe("main.py", 8, "--batch-size 128 --weight-decay 0.05 --warmup-epochs 5 --drop-path 0.1"),
        "pervit_m": Recipe("main.py", 8, "--batch-size 128 --weight-decay 0.05 --warmup-epochs 20 --drop-path 0.2"),
    },
    "convit": {"convit_ti": Recipe("main.py", 4, "--batch-size 256")},
    "deit": {"deit_t": Recipe("main.py", 4, "--batch-size 256")},
    "lsat": {
        "lsat_t_224": Recipe("main_tiny_imagenet.py", 8, "--batch-size 92"),
        "lsat_s_224": Recipe("main_small_imagenet.py", 8, "--batch-size 64"),
        "lsat_t_32_cifar10": Recipe("main_tiny_cifar.py", 8, "--batch-size 92"),
        "lsat_s_32_cifar10": Recipe("main_small_cifar.py", 8, "--batch-size 40"),
        "lsat_b_32_cifar10": Recipe("main_base_cifar.py", 8, "--batch-size 20"),
    },
    "posmlp": {
        "posmlp_t": Recipe("main.py", 8, "", "config/PosMLP_T.yaml", "logs/PosMLP-T.csv"),
        "posmlp_s": Recipe("main.py", 8, "", "config/PosMLP_S.yaml", "logs/PosMLP-S.csv"),
        # No script is published for gMLP under this recipe: T's files with the paper's learning rate for T.
        "gmlp_s": Recipe("main.py", 4, "--lr 1e-3", "config/PosMLP_T.yaml", "logs/PosMLP-T.csv"),
    },
}


def arguments(checkout: Path, recipe: Recipe) -> argparse.Namespace:
    """What the script's ``main`` has when it builds optimizer and scheduler."""
    if recipe.yaml:
        import opt  # PosMLP's: its parser
        import yaml

        opt.parser.set_defaults(**yaml.safe_load((checkout / recipe.yaml).read_text()))
        return opt.parser.parse_args(recipe.options.split())
    script = Script(checkout / recipe.script)
    parsed = script.parsed_arguments(recipe.options.split())
    script.scale_rates(parsed, recipe.processes)
    return parsed


def schedule(checkout: Path, recipe: Recipe) -> dict[str, Any]:
    """The learning rates of a run.

    Returns:
        ``at``: epoch that the scheduler is set to -> learning rate, at 40 epochs; ``sum``: of the learning rates in force over
        the cosine's epochs; ``lag``: see :meth:`Script.lag`; ``epochs``: of the cosine, ``epochs_in_code``: that the script's
        loop runs for, ``epochs_in_log``: that the published log has; and the arguments of the optimizer.
    """
    from timm.scheduler import create_scheduler

    parsed = arguments(checkout, recipe)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=parsed.lr)
    scheduler, length = create_scheduler(parsed, optimizer)
    lag = Script(checkout / recipe.script).lag()
    in_force = []
    for epoch in range(parsed.epochs):
        in_force.append(optimizer.param_groups[0]["lr"])
        scheduler.step(epoch + 1 - lag)
    near = {0, 1, parsed.warmup_epochs - 1, parsed.warmup_epochs, parsed.warmup_epochs + 1, parsed.epochs - 1}
    spread = [round(float(epoch)) for epoch in np.linspace(0, parsed.epochs - 1, POINTS)]
    points = sorted(near | set(spread[2 : POINTS - 3]))
    rates = {}
    for epoch in points:
        scheduler.step(epoch)
        rates[str(epoch)] = optimizer.param_groups[0]["lr"]
    return {
        "script": recipe.script,
        "options": recipe.options,
        "yaml": recipe.yaml,
        "processes": recipe.processes,
        "batch": parsed.batch_size * recipe.processes,
        "epochs": parsed.epochs,
        "epochs_in_code": length if recipe.yaml else parsed.epochs,  # only PosMLP's loop runs for as long as the scheduler says
        "epochs_in_log": len((checkout / recipe.log).read_text().splitlines()) - 1 if recipe.log else None,
        "lag": lag,
        "weight_decay": parsed.weight_decay,
        "eps": parsed.opt_eps,
        "betas": parsed.opt_betas,
        "clip_grad": parsed.clip_grad,
        "at": rates,
        "sum": sum(in_force),
    }
