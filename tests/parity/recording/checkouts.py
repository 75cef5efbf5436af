"""The authors' checkouts: how they are imported beside a present PyTorch, and how parts of their scripts are run."""

from __future__ import annotations

import argparse
import ast
import collections.abc
import importlib
import math
import platform
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

SINCE_REMOVED = {  # modules that PyTorch had when the pinned timm was written
    "torch._six": dict(container_abcs=collections.abc, string_classes=(str, bytes), int_classes=int, inf=math.inf),
}
NOT_USED = ("matplotlib", "matplotlib.pyplot")  # imported by the authors' models, for pictures


def prepare(checkout: Path | None, timm: Path) -> None:
    """Let ``import`` find the pinned timm and then the checkout, and give both the environment that they were written for."""
    sys.path[:0] = [str(timm)] + ([str(checkout)] if checkout else [])
    for name, contents in SINCE_REMOVED.items():
        module = types.ModuleType(name)
        module.__dict__.update(contents)
        sys.modules[name] = module
    for name in NOT_USED:
        sys.modules[name] = types.ModuleType(name)
    np.bool = bool  # removed in NumPy 1.24, back with another meaning in 2.0
    # PerViT builds its tables on a GPU.
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
    on_device = torch.Tensor.to
    torch.Tensor.to = lambda tensor, *a, **k: tensor if a[:1] == ("cuda",) else on_device(tensor, *a, **k)  # type: ignore


def versions(checkout: Path | None, timm: str) -> dict[str, str]:
    """What a fixture was made from."""
    found = {"timm": timm, "python": platform.python_version()}
    found |= {name: importlib.import_module(name).__version__ for name in ("torch", "torchvision", "numpy", "PIL")}
    if checkout:
        git = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
        found["commit"] = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    return found


class Script:
    """A training script of the authors', of which parts are run.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.tree = ast.parse(path.read_text())

    def parsed_arguments(self, arguments: list[str]) -> argparse.Namespace:
        """The script's options and their defaults, by its own parser."""
        (definition,) = [node for node in self.tree.body if getattr(node, "name", "") == "get_args_parser"]
        namespace: dict[str, Any] = {"argparse": argparse}
        exec(compile(ast.Module([definition], []), "get_args_parser", "exec"), namespace)
        return argparse.ArgumentParser(parents=[namespace["get_args_parser"]()]).parse_args(arguments)

    def scale_rates(self, arguments: argparse.Namespace, processes: int) -> None:
        """Run the lines that scale learning rates by the batch size; they change ``arguments``."""
        scope = {"args": arguments, "utils": types.SimpleNamespace(get_world_size=lambda: processes)}
        for line in self._statements(ast.Assign):
            if ast.unparse(line.targets[0]).startswith(("linear_scaled_", "args.lr", "args.warmup_lr", "args.min_lr")):
                exec(ast.unparse(line), scope)

    def lag(self) -> int:
        """Epochs by which the schedule is late: 1 if the epoch that has ended is what the scheduler steps to, 0 if the next."""
        calls = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]
        steps = [ast.unparse(call.args[0]) for call in calls if ast.unparse(call.func) == "lr_scheduler.step"]
        (last,) = {step for step in steps if step in ("epoch", "epoch + 1")}
        return {"epoch": 1, "epoch + 1": 0}[last]

    def decays_as_wrapped(self) -> bool:
        """Whether the optimizer is built from the model in its DistributedDataParallel, which hides the list of exceptions."""
        lines = {ast.unparse(line.targets[0]): line for line in self._statements(ast.Assign)}
        optimizer = lines["optimizer"]
        seen = ast.unparse(optimizer.value.args[1])
        wrapped = [line.lineno for line in self._statements(ast.Assign) if "DistributedDataParallel" in ast.unparse(line.value)]
        return seen == "model" and any(line < optimizer.lineno for line in wrapped)

    def _statements(self, kind: type) -> Iterator[Any]:
        """All statements of ``main`` of a kind, in their order in the file."""
        (main,) = [node for node in self.tree.body if getattr(node, "name", "") == "main"]
        return iter(sorted((node for node in ast.walk(main) if isinstance(node, kind)), key=lambda node: node.lineno))
