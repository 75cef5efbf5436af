"""DeiT III beside timm, torchvision and the authors' code, run here: loss, schedule, decay, depth, scores.

The pixels are in test_deit3_augmentation.py.

Needs timm and torchvision (``pip install timm torchvision``); the authors' code where ``PERVIT_DEIT_CODE`` names a clone of
github.com/facebookresearch/deit, which may be bare.
"""

from __future__ import annotations

import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.config import TrainConfig, load_config
from pipeline.models import create_model
from pipeline.models.weights.reference_names import authors_names, reference_state_dict
from pipeline.models.weights.transfer import resample_positions
from pipeline.optim.build import build_optimizer, learning_rate
from pipeline.step.loss import Objective, label_loss
from support.deit_code import authors_module, authors_source, needs_code

timm = pytest.importorskip("timm", reason="timm is not installed")
torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed", exc_type=ImportError)

from timm.data.mixup import mixup_target  # noqa: E402
from timm.loss import BinaryCrossEntropy  # noqa: E402
from timm.optim import param_groups_weight_decay  # noqa: E402
from timm.scheduler import CosineLRScheduler  # noqa: E402

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(("threshold", "smoothing"), [(0.0, 0.0), (None, 0.0), (None, 0.1), (0.2, 0.1)])
def test_the_loss_and_its_gradient_are_timms(threshold: float | None, smoothing: float) -> None:
    """Beside ``timm.loss.BinaryCrossEntropy`` of ``timm.data.mixup``'s targets, and without mixing."""
    generator = torch.Generator().manual_seed(0)
    labels, weight = torch.randint(0, 50, (16,), generator=generator), 0.37
    scores = torch.randn(16, 50, generator=generator)
    train = TrainConfig(loss="bce", bce_threshold=threshold, label_smoothing=smoothing)
    for share in (weight, 1.0):
        batch = types.SimpleNamespace(labels=labels, other_labels=labels.flip(0), weight=torch.full((16,), share))
        targets = mixup_target(labels, 50, share, smoothing)
        theirs = gradient(scores, lambda x, y=targets: BinaryCrossEntropy(smoothing, target_threshold=threshold)(x, y))
        ours = gradient(scores, lambda x, b=batch: Objective(label_loss(train))(x, b))
        assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
        torch.testing.assert_close(ours[1], theirs[1], rtol=1e-5, atol=1e-9)
    if threshold == 0:  # the authors' engine.py and main.py
        authors = gradient(
            scores, lambda x: F.binary_cross_entropy_with_logits(x, mixup_target(labels, 50, 1.0).gt(0.0).float())
        )
        assert ours[0] == pytest.approx(authors[0], rel=1e-6)


def gradient(scores: Tensor, loss: object) -> tuple[float, Tensor]:
    x = scores.clone().requires_grad_()
    value = loss(x)
    value.backward()
    return value.item(), x.grad


@pytest.mark.parametrize(("name", "rate"), [("deit3_s", 4e-3), ("deit3_b", 3e-3), ("deit3_b_224", 1e-5)])
def test_learning_rates_at_forty_epochs(name: str, rate: float) -> None:
    """Beside timm's scheduler with the published command's options: ``--unscale-lr``, 5 epochs of warm-up, final rate 1e-5."""
    config, steps = load_config(CONFIGS / f"{name}.yaml"), 20
    epochs = int(config.train.epochs)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate)
    theirs = CosineLRScheduler(optimizer, t_initial=epochs, lr_min=1e-5, warmup_t=5, warmup_lr_init=1e-6)
    for epoch in sorted({*range(6), *np.linspace(5, epochs - 1, 40).round().astype(int).tolist()}):
        expected = theirs._get_lr(epoch)[0]
        ours = learning_rate(epoch * steps, steps, epochs, config.train.global_batch_size, config.optim)
        assert ours == pytest.approx(expected, rel=1e-12 if name != "deit3_b_224" else 1e-3), epoch


def timm_name(name: str) -> str:
    """timm's name of a parameter that has the authors' name."""
    return name.replace("gamma_1", "ls1.gamma").replace("gamma_2", "ls2.gamma")


def pair(ours: str = "deit3_s", theirs: str = "deit3_small_patch16_224", seed: int = 0) -> tuple[nn.Module, nn.Module]:
    """Our model and timm's with the same weights; LayerScale's factors large enough to matter."""
    torch.manual_seed(seed)
    own = create_model(ours, num_classes=1000)
    for name, parameter in own.named_parameters():
        if "layer_scale" in name:
            nn.init.uniform_(parameter, 0.1, 1)
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.02)
    other = timm.create_model(theirs)
    other.load_state_dict({timm_name(name): value for name, value in reference_state_dict(own).items()}, strict=True)
    return own.eval(), other.eval()


@torch.no_grad()
def test_scores_are_timms() -> None:
    """The same weights, the same scores to 1e-5, of images and of noise."""
    own, other = pair()
    images = torch.cat([torch.randn(2, 3, 224, 224), torch.rand(2, 3, 224, 224)])
    ours, theirs = own(images), other(images)
    assert theirs.std() > 0.1
    assert (ours - theirs).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["deit3_s", "deit3_b"])
def test_the_same_parameters_decay_as_in_timm(name: str) -> None:
    """Beside timm's groups: matrices decay, but not LayerScale, norms, biases, the class token and the positions."""
    config = load_config(CONFIGS / f"{name}.yaml")
    optim = config.optim.model_copy(update={"name": "adamw"})  # the groups are the same for every optimizer
    with torch.device("meta"):
        own = create_model(name)
        other = timm.create_model({"deit3_s": "deit3_small_patch16_224", "deit3_b": "deit3_base_patch16_224"}[name])
    own.to_empty(device="cpu")  # the values do not matter; a fused optimizer takes no meta tensors
    exempt = other.no_weight_decay()
    plain, decayed = param_groups_weight_decay(other, config.optim.weight_decay, no_weight_decay_list=exempt)
    names = {id(parameter): key for key, parameter in other.named_parameters()}
    theirs = [{names[id(parameter)] for parameter in group["params"]} for group in (decayed, plain)]
    by_id = {id(parameter): key for key, parameter in own.named_parameters()}
    authors = {key: timm_name(each) for each, key in authors_names(own).items()}
    ours = [
        {authors[by_id[id(parameter)]] for parameter in group["params"]} for group in build_optimizer(own, optim).param_groups
    ]
    assert ours == theirs and all(ours)


@needs_code
def test_scores_and_stochastic_depth_are_the_authors() -> None:
    """The authors' own model with the same weights and the same dropped branches: scores in both modes, and the rates."""
    models_v2 = authors_module("models_v2")
    own = create_model("deit3_s", num_classes=10, image_size=64, drop_path=0.2)
    for name, parameter in own.named_parameters():
        if "layer_scale" in name:
            nn.init.uniform_(parameter, 0.1, 1)
    other = models_v2.deit_small_patch16_LS(img_size=64, num_classes=10, drop_path_rate=0.2)
    other.load_state_dict(reference_state_dict(own), strict=True)
    assert [block.drop_path.drop_prob for block in other.blocks for _ in range(2)] == pytest.approx(
        own.drop_path_rates.tolist()
    )
    fresh = models_v2.deit_small_patch16_LS(img_size=64, num_classes=10).blocks[0].gamma_1
    assert torch.equal(fresh.detach(), create_model("deit3_s", image_size=64).blocks[0].layer_scale1.detach())
    images, noise = torch.randn(4, 3, 64, 64), torch.rand(4, own.noise_per_sample)
    with torch.no_grad():
        torch.testing.assert_close(own.eval()(images), other.eval()(images), rtol=0, atol=1e-5)
        scales = own.train().branch_scales(4, noise)
        for i, block in enumerate(other.blocks):
            columns = iter((2 * i, 2 * i + 1))
            block.drop_path.forward = lambda x, columns=columns: x * scales[:, next(columns), None, None]
        torch.testing.assert_close(own(images, noise), other.train()(images), rtol=0, atol=1e-5)


@needs_code
def test_fine_tuning_resamples_positions_as_the_authors_do() -> None:
    """The lines of the authors' ``main.py`` for 192 to 224 pixels, on the same embedding."""
    source = authors_source("main")
    lines = source[
        source.index("        # interpolate position embedding") : source.index(
            "        model.load_state_dict(checkpoint_model"
        )
    ]
    value = torch.randn(1, 144, 384)
    scope = {
        "torch": torch,
        "checkpoint_model": {"pos_embed": value},
        "model": types.SimpleNamespace(patch_embed=types.SimpleNamespace(num_patches=196), pos_embed=torch.zeros(1, 196, 384)),
    }
    exec("if True:\n" + lines, scope)
    torch.testing.assert_close(resample_positions(value, torch.Size((1, 196, 384)), 0), scope["checkpoint_model"]["pos_embed"])
