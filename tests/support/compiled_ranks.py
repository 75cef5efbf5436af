"""Compile the loss with Inductor on each rank; each prints what it has found in the cache, what it has compiled, and its folder.

The argument is a run folder. The model has no block: two graphs suffice, and a compiler for C++ takes seconds for each.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from pipeline.cluster.rendezvous import disconnect, init_world
from pipeline.config import TrainConfig
from pipeline.models.common.base import Switches, VisionModel
from pipeline.step.loss import Objective, label_loss
from pipeline.training.compiling import INDUCTOR, Compilation


class Linear(VisionModel):
    """The simplest classifier: (B, 3, 2, 2) -> (B, 10)."""

    def __init__(self) -> None:
        super().__init__([], False, Switches())
        self.head = torch.nn.Linear(12, 10)

    def class_scores(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        return self.head(images.flatten(1))


def main() -> int:
    world, labels, turns = init_world(), torch.arange(2), []
    batch = SimpleNamespace(images=torch.randn(2, 3, 2, 2), labels=labels, other_labels=labels, weight=torch.ones(2))
    compilation = Compilation("blocks", "fp32", Path(sys.argv[1]), world, Linear(), Objective(label_loss(TrainConfig())), False)
    compilation.prepare(batch, None, accumulates=False, progress=lambda: turns.append(compiled()))
    print(json.dumps([compilation.kind, turns, os.environ[INDUCTOR]]))
    disconnect()
    return 0


def compiled() -> list[int]:
    """Graphs that were found, and that were made."""
    return [counters["inductor"][f"fxgraph_cache_{what}"] for what in ("hit", "miss")]


if __name__ == "__main__":
    sys.exit(main())
