"""``examples.detection.train`` with one more backbone, a PosMLP that trains within minutes, for ``support.ranks``."""

from __future__ import annotations

from examples.detection.train import main as main
from pipeline.models.gated_mlp.posmlp import PosMLP, PosMLPSwitches
from pipeline.models.registry import register

WIDTH = 32  # of 96: a ninth of PosMLP-T's parameters

register(PosMLP, PosMLPSwitches, "none", posmlp_narrow=(WIDTH, "PosMLP of width 32", None, None, None))
