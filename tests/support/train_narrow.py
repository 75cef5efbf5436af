"""``pipeline.train`` with more models: a narrow one of each family whose smallest has 10 million parameters or more."""

from __future__ import annotations

from functools import partial

from pipeline import train
from pipeline.models.gated_mlp.gmlp import GMLP, GMLPSwitches
from pipeline.models.gated_mlp.posmlp import PosMLP, PosMLPSwitches
from pipeline.models.lsat.blocks import SHIFTS_224
from pipeline.models.lsat.model import LSAT, LSATLayout, LSATSwitches
from pipeline.models.registry import register


def main() -> int:
    lsat = LSATLayout((32, 64, 128), (2, 4, 8), (2, 2, 2), 4, 4, 0, SHIFTS_224, "per_head")
    register(partial(GMLP, depth=6, ratio=6), GMLPSwitches, "", gmlp_narrow=(64, "gMLP, 6 blocks", None, None, None))
    register(PosMLP, PosMLPSwitches, "", posmlp_narrow=(32, "PosMLP, width 32", None, None, None))
    register(LSAT, LSATSwitches, "", lsat_narrow=(lsat, "LSAT, three levels", None, None, None))
    return train.main()
