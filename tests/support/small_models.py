"""A small model of each family for the parity tests; the authors' are in ``tests/parity/recording/models.py``."""

from __future__ import annotations

from pipeline.models.common.base import VisionModel
from pipeline.models.common.vit import ViTLayout
from pipeline.models.convit import ConViT, ConViTSwitches
from pipeline.models.deit import DeiT
from pipeline.models.gated_mlp.gmlp import GMLP
from pipeline.models.gated_mlp.posmlp import PosMLP, PosMLPSwitches
from pipeline.models.lsat.blocks import SHIFTS_32, SHIFTS_224
from pipeline.models.lsat.model import LSAT, LSATLayout
from pipeline.models.pervit.model import PerViT, PerViTLayout
from support import parity


def build(name: str) -> VisionModel:
    """The small model as the authors' side builds it, in ``recording/models.py``."""
    variant = parity.VARIANTS[name]
    common = dict(num_classes=parity.CLASSES, image_size=variant.image_size, drop_path=variant.drop_path)
    if name == "pervit":
        return PerViT(PerViTLayout(2, (16, 24, 32, 40), (8, 8, 12, 16)), **common)
    if name == "convit":
        return ConViT(ViTLayout(4, 32, depth=4), switches=ConViTSwitches(gpsa_layers=2), **common)
    if name == "deit":
        return DeiT(ViTLayout(2, 32, depth=3), **common)
    if name == "lsat_224":
        return LSAT(LSATLayout((16, 24, 32), (2, 2, 4), (2, 2, 2), 4, 4, 0, SHIFTS_224, "per_head"), **common)
    if name == "lsat_32":
        return LSAT(LSATLayout((16,) * 4, (2,) * 4, (2,) * 4, 3, 1, 1, SHIFTS_32, "shared"), **common)
    if name == "posmlp":
        return PosMLP(8, switches=PosMLPSwitches(groups=(2, 4, 8, 16), block_dropout=0, head_dropout=0), **common)
    return GMLP(32, 4, 6, **common)
