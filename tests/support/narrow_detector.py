"""``python -m support.narrow_detector``: ``examples.detection.train`` with one more backbone, a PosMLP that trains within minutes."""

from __future__ import annotations

from typing import Any

from examples.detection.train import command
from pipeline.models.gated_mlp.posmlp import PosMLP
from pipeline.models.gated_mlp.posmlp_switches import PosMLPSwitches
from pipeline.models.registry import register

WIDTH = 32  # of 96: a ninth of PosMLP-T's parameters


@register("PosMLP of width 32", paper="none", switches=PosMLPSwitches, paper_params_m=None, paper_gmacs=None, paper_top1=None)
def posmlp_narrow(**options: Any) -> PosMLP:
    return PosMLP(WIDTH, **options)


if __name__ == "__main__":
    command()
