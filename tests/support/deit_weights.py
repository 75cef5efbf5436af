"""Weights as DeiT's authors publish them: their names and shapes, random numbers."""

from __future__ import annotations

import torch


def published_weights() -> dict[str, torch.Tensor]:
    """Random weights under the names and in the shapes of the authors' DeiT-T for 48 pixels and 5 classes."""
    shapes = {"cls_token": (1, 1, 192), "pos_embed": (1, 10, 192)}
    shapes |= {"patch_embed.proj.weight": (192, 3, 16, 16), "patch_embed.proj.bias": (192,)}
    linear = {"attn.qkv": (576, 192), "attn.proj": (192, 192), "mlp.fc1": (768, 192), "mlp.fc2": (192, 768)}
    for layer in range(12):
        for norm in ("norm1", "norm2"):
            shapes |= {f"blocks.{layer}.{norm}.weight": (192,), f"blocks.{layer}.{norm}.bias": (192,)}
        for name, shape in linear.items():
            shapes |= {f"blocks.{layer}.{name}.weight": shape, f"blocks.{layer}.{name}.bias": shape[:1]}
    shapes |= {"norm.weight": (192,), "norm.bias": (192,), "head.weight": (5, 192), "head.bias": (5,)}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) * 0.05 for name, shape in shapes.items()}
