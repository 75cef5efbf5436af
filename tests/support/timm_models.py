"""Small models of timm, one of each of twelve kinds, for runs of seconds on a CPU."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
import torch

from pipeline.errors import install_extra

SIZE = 64  # pixels
# Kind -> name, and switches that make it shallow where timm has no small one.
ARCHITECTURES: dict[str, tuple[str, str]] = {
    "ViT": ("vit_tiny_patch16_224", "{depth: 2, patch_drop_rate: 0.25, drop_rate: 0.1, proj_drop_rate: 0.1, attn_drop_rate: 0.1}"),
    "DeiT-III": ("deit3_small_patch16_224", "{depth: 2, embed_dim: 192, num_heads: 3}"),
    "Swin": ("swin_tiny_patch4_window7_224", "{depths: [1, 1, 2, 1], embed_dim: 48}"),
    "ConvNeXt": ("convnext_atto", "{depths: [1, 1, 2, 1]}"),
    "EfficientNet": ("efficientnet_b0", "{}"),
    "ResNet": ("resnet18", "{}"),
    "RegNet": ("regnety_002", "{}"),
    "MaxViT": ("maxvit_rmlp_pico_rw_256", "{}"),
    "EVA": ("eva02_tiny_patch14_224", "{depth: 2, patch_size: 16}"),
    "MobileNetV4": ("mobilenetv4_conv_small", "{drop_rate: 0.1}"),
    "CoAtNet": ("coatnet_pico_rw_224", "{}"),
    "Hiera": ("hiera_tiny_224", "{stages: [1, 1, 2, 1]}"),
}  # fmt: skip


def installed_timm() -> ModuleType:
    """timm, or a skip with the reason why it does not load here."""
    if importlib.util.find_spec("timm") is None:
        pytest.skip(f"timm is not installed: {install_extra('timm')}")
    try:
        import timm
    except Exception as error:  # torchvision's operators are of another build of PyTorch
        pytest.skip(f"timm does not load beside PyTorch {torch.__version__}: {error}")
    return timm


def overrides(kind: str) -> list[str]:
    """Config keys of a run with this kind of model."""
    name, switches = ARCHITECTURES[kind]
    return [
        f"model.name=timm:{name}",
        f"model.switches={switches}",
        f"model.image_size={SIZE}",
        "model.drop_path=0.2",
        "train.zero_stage=2",
        "train.ema_decay=0.9",
        "log.every_steps=1",
        "checkpoint.every_steps=1",
    ]
