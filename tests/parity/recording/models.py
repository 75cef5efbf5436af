"""The authors' models: published ones for the parameter groups, small ones for trajectories of five steps."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
import tempfile
import types
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from support import parity

from .checkouts import Script
from .recipes import RECIPES, arguments

LAYER_NORM = partial(nn.LayerNorm, eps=1e-6)
PUBLISHED = {
    "pervit": ("pervit_t", "pervit_s", "pervit_m"),
    "convit": ("convit_ti",),
    "deit": ("deit_t",),
    "lsat": ("lsat_t_224", "lsat_s_224", "lsat_t_32"),
    "posmlp": ("posmlp_t", "posmlp_s", "gmlp_s"),
}
SMALL = {
    "pervit": ("pervit",),
    "convit": ("convit",),
    "deit": ("deit",),
    "lsat": ("lsat_224", "lsat_32"),
    "posmlp": ("posmlp", "gmlp"),
}


def _lsat(module: str, **settings: Any) -> nn.Module:
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):  # it describes itself in files
        options = dict(scaling_factor=4, init_patch_embed_size=1, num_hierarchies=len(settings["num_layers_per_block"]))
        return importlib.import_module(module).ShiftingTransformer(**options, output_dir=folder, **settings)


def published(name: str, checkout: Path) -> nn.Module:
    """A model of the papers, as the authors' scripts build it."""
    if name.startswith("pervit"):
        sizes = {"t": "tiny", "s": "small", "m": "medium"}
        return getattr(importlib.import_module("model.models"), f"pervit_{sizes[name[-1]]}")()
    if name == "convit_ti":
        return importlib.import_module("models").convit_tiny(embed_dim=48)
    if name == "deit_t":
        return importlib.import_module("models").deit_tiny_patch16_224()
    if name == "lsat_t_224":
        shape = dict(patch_size=7, kernel_size=9, stride_size=7, padding_size=1, num_variants=10, image_size=224)
        layout = dict(embedding_dim=((192, 192),) * 4, heads=(4,) * 4, num_layers_per_block=(2, 4, 4, 4))
        return _lsat("imagenet_model", **shape, **layout, num_classes=1000)
    if name == "lsat_s_224":
        shape = dict(patch_size=4, kernel_size=4, stride_size=4, padding_size=0, num_variants=10, image_size=224)
        layout = dict(embedding_dim=((64, 192), (192, 384), (384, 384)), heads=(2, 6, 12), num_layers_per_block=(2, 2, 10))
        return _lsat("imagenet_model", **shape, **layout, num_classes=1000)
    if name == "lsat_t_32":
        shape = dict(patch_size=1, kernel_size=3, stride_size=1, padding_size=1, num_variants=18, image_size=32)
        layout = dict(embedding_dim=((192, 192),) * 4, heads=4, num_layers_per_block=(2, 4, 4, 4))
        return _lsat("cifar.cifar_model", **shape, **layout, num_classes=10)
    if name == "gmlp_s":
        return importlib.import_module("timm.models.mlp_mixer").gmlp_s16_224()
    hyper = arguments(checkout, RECIPES["posmlp"][name]).model_hyper
    return importlib.import_module("models.posmlp").Create_PosMLP(img_size=224, **hyper)


def _on_sixteen_tokens() -> None:
    """PerViT's code has 196 tokens written into it; a trajectory takes images of 64 pixels."""
    package = importlib.import_module("model")
    source = (Path(package.__path__[0]) / "pervit.py").read_text()
    assert source.count("num_patches = 196") == 1
    module = types.ModuleType("model.pervit")
    module.__package__ = "model"
    exec(compile(source.replace("num_patches = 196", "num_patches = 16"), "pervit.py", "exec"), module.__dict__)
    sys.modules["model.pervit"] = module


def small(name: str) -> nn.Module:
    """A small model that our side builds too; see ``VARIANTS`` of ``tests/support/parity.py``."""
    variant = parity.VARIANTS[name]
    common = dict(num_classes=parity.CLASSES, drop_path_rate=variant.drop_path)
    if name == "pervit":
        _on_sixteen_tokens()
        widths = dict(emb_dims=[16, 24, 32, 40], convstem_dims=[3, 8, 8, 12, 16])
        return importlib.import_module("model.pervit").VisionTransformer(num_heads=2, norm_layer=LAYER_NORM, **widths, **common)
    if name == "convit":
        layout = dict(img_size=64, embed_dim=32, depth=4, num_heads=4, local_up_to_layer=2, norm_layer=LAYER_NORM)
        return importlib.import_module("convit").VisionTransformer(**layout, **common)
    if name == "deit":
        layout = dict(img_size=64, embed_dim=32, depth=3, num_heads=2, qkv_bias=True, norm_layer=LAYER_NORM)
        return importlib.import_module("timm.models.vision_transformer").VisionTransformer(**layout, **common)
    if name.startswith("lsat"):
        common = dict(num_classes=parity.CLASSES, stochastic_depth_drop=variant.drop_path, image_size=variant.image_size)
    if name == "lsat_224":
        shape = dict(patch_size=4, kernel_size=4, stride_size=4, padding_size=0, num_variants=10)
        layout = dict(embedding_dim=((16, 24), (24, 32), (32, 32)), heads=(2, 2, 4), num_layers_per_block=(2, 2, 2))
        return _lsat("imagenet_model", **shape, **layout, **common)
    if name == "lsat_32":
        shape = dict(patch_size=1, kernel_size=3, stride_size=1, padding_size=1, num_variants=18)
        layout = dict(embedding_dim=((16, 16),) * 4, heads=2, num_layers_per_block=(2, 2, 2, 2))
        return _lsat("cifar.cifar_model", **shape, **layout, **common)
    if name == "posmlp":
        layout = dict(embed_dims=(8, 16, 32, 64), win_size=(4, 4, 4, 2), gamma=(2, 4, 8, 16), num_levels=4)
        return importlib.import_module("models.posmlp").PosMLP(img_size=64, **layout, drop_rate=0.0, **common)
    mixer = importlib.import_module("timm.models.mlp_mixer")
    layers = dict(block_layer=mixer.SpatialGatingBlock, mlp_layer=mixer.GatedMlp)
    return mixer.MlpMixer(img_size=64, patch_size=16, num_blocks=4, embed_dim=32, mlp_ratio=6, **layers, **common)


def optimizer_of(model: nn.Module, parsed: argparse.Namespace, script: Script) -> torch.optim.Optimizer:
    """As ``main`` makes it: from the bare model, or from the one in its DistributedDataParallel."""
    from timm.optim import create_optimizer

    if not script.decays_as_wrapped():
        return create_optimizer(parsed, model)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        return create_optimizer(parsed, nn.parallel.DistributedDataParallel(model))
    finally:
        torch.distributed.destroy_process_group()


def groups(family: str, name: str, checkout: Path) -> dict[str, Any]:
    """The parameters that decay and those that do not, by the authors' names with ``*`` for numbers -> how many there are."""
    recipe = RECIPES[family].get(name) or RECIPES[family][f"{name}_cifar10"]
    model, script = published(name, checkout), Script(checkout / recipe.script)
    parsed = arguments(checkout, recipe)
    names = {id(parameter): key for key, parameter in model.named_parameters()}
    found: dict[str, list[str]] = {"decayed": [], "not_decayed": []}
    for group in optimizer_of(model, parsed, script).param_groups:
        assert group["weight_decay"] in (0, parsed.weight_decay)
        found["decayed" if group["weight_decay"] else "not_decayed"] += [names[id(each)] for each in group["params"]]
    return {"wrapped": script.decays_as_wrapped()} | {key: parity.folded(keys) for key, keys in found.items()}


@contextlib.contextmanager
def given_noise(noise: np.ndarray, undropped: int) -> Iterator[None]:
    """Stochastic depth, which draws by ``torch.rand`` branch by branch, gets these numbers: (B, branches)."""
    columns = iter(noise.T[undropped:])
    drawn, torch.rand = torch.rand, lambda shape, **_: torch.from_numpy(next(columns).copy()).view(shape)
    try:
        yield
    finally:
        torch.rand = drawn
    assert next(columns, None) is None, "fewer branches than said"


def trajectory(family: str, name: str, checkout: Path) -> dict[str, np.ndarray]:
    """Five steps in float64 from given weights on given images.

    Returns:
        ``names`` (P,) of the state dict; ``losses`` (steps,); ``scores`` (B, classes) of the first step; ``norms`` and
        ``products`` (steps, P), the two numbers of :func:`support.parity.fingerprint` after each step.
    """
    from timm.data.mixup import mixup_target
    from timm.loss import SoftTargetCrossEntropy

    torch.set_default_dtype(torch.float64)
    variant = parity.VARIANTS[name]
    recipe = RECIPES[family][variant.recipe]
    model = small(name).double().train()
    state = model.state_dict()
    tables = {key for key in state if key.endswith("rel_indices")}  # constant, built by the model
    for key, value in state.items():
        if key not in tables:
            value.copy_(torch.from_numpy(np.asarray(parity.weight(key, tuple(value.shape)))))
    optimizer = optimizer_of(model, arguments(checkout, recipe), Script(checkout / recipe.script))
    names = sorted(key for key, value in state.items() if value.is_floating_point() and key not in tables)
    losses, prints, first = [], [], None
    for step, rate in enumerate(parity.LEARNING_RATES):
        given = parity.step_input(variant, step)
        labels = torch.from_numpy(given.labels)
        target = mixup_target(labels, parity.CLASSES, given.own_share, parity.SMOOTHING, device="cpu")
        with given_noise(given.noise, variant.undropped):
            scores = model(torch.from_numpy(given.images))
        loss = SoftTargetCrossEntropy()(scores, target)
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        losses.append(loss.item())
        first = scores.detach().numpy() if first is None else first
        state = model.state_dict()
        prints.append([parity.fingerprint(key, state[key].numpy()) for key in names])
    norms, products = np.moveaxis(np.array(prints), -1, 0)  # (steps, P) each
    return {"names": np.array(names), "losses": np.array(losses), "scores": first, "norms": norms, "products": products}
