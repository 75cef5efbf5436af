"""DeiT III: what it adds to DeiT, its names, sizes and the transfer from 192 to 224 pixels."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from pipeline.errors import UserError
from pipeline.models import create_model, model_entry
from pipeline.models.common.vit import ViTLayout
from pipeline.models.deit import DeiT3, DeiT3Switches
from pipeline.models.weights.reference_names import load_reference_state_dict, reference_state_dict
from pipeline.models.weights.transfer import load_pretrained

SMALL = ViTLayout(heads=2, width=32, depth=3)


def small(size: int = 48, **options: object) -> DeiT3:
    torch.manual_seed(0)
    return DeiT3(SMALL, num_classes=10, image_size=size, **options)


def spread(model: DeiT3) -> DeiT3:
    """With LayerScale's factors so large, and different, that an error in them shows in the scores."""
    for name, parameter in model.named_parameters():
        if "layer_scale" in name:
            torch.nn.init.uniform_(parameter, 0.2, 1.5)
    return model.eval()


@pytest.mark.parametrize("name", ["deit3_s", "deit3_m", "deit3_b"])
def test_sizes_are_the_published_ones(name: str) -> None:
    """Guards against another width, depth or head, LayerScale in one branch only, and a class token with a position."""
    with torch.device("meta"):
        model = create_model(name)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    assert millions == pytest.approx(model_entry(name).paper_params_m, abs=0.06)
    assert tuple(model.position_embedding.weight.shape[:2]) == (1, 196)
    factors = [parameter for key, parameter in model.named_parameters() if "layer_scale" in key]
    assert len(factors) == 24 and all(parameter.ndim == 1 for parameter in factors)


def test_layer_scale_begins_as_asked() -> None:
    """Guards against a switch without effect: its value, and a block without the parameters where it is null."""
    model = small(switches=DeiT3Switches(layer_scale=0.25))
    assert (model.blocks[1].layer_scale1 == 0.25).all() and (model.blocks[2].layer_scale2 == 0.25).all()
    plain = small(switches=DeiT3Switches(layer_scale=None))
    assert not any("layer_scale" in name for name, _ in plain.named_parameters())
    whole = small(switches=DeiT3Switches(layer_scale=1.0))  # factors of 1 change nothing
    whole.load_state_dict(plain.state_dict(), strict=False)
    images = torch.randn(2, 3, 48, 48)
    torch.testing.assert_close(whole.eval()(images), plain.eval()(images))


def test_every_block_drops_at_the_same_rate() -> None:
    """Guards against DeiT's rates, which grow with depth, and a branch that is not dropped: one kept branch at a time."""
    model = spread(small(drop_path=0.25)).train()
    assert model.drop_path_rates.tolist() == [0.25] * 6
    images = torch.randn(1, 3, 48, 48)
    block = model.blocks[0]
    x = torch.cat([model.class_token, model.position_embedding(model.patch_embedding(images), (3, 3))], dim=1)
    for branch, expected in (
        (0, block.layer_scale1 * block.attn(block.norm1(x), None)),
        (1, block.layer_scale2 * block.mlp(block.norm2(x))),
    ):
        noise = torch.full((1, 6), 0.0)
        noise[0, branch] = 0.99  # kept where noise is at or above the rate
        scales = model.branch_scales(1, noise)
        assert scales.flatten()[branch] == pytest.approx(1 / 0.75) and scales.sum() == scales.flatten()[branch]
        torch.testing.assert_close(block(x, scales[:, :2]) - x, expected / 0.75, rtol=1e-4, atol=1e-6)


def test_from_192_to_224_pixels() -> None:
    """Guards against fine-tuning that reinitializes or misplaces the position embedding: DeiT's bicubic resampling, no class token."""
    there, here = spread(small(192)), small(224)
    notes = load_pretrained(here, there.state_dict(), "a run")
    assert any("position_embedding.weight is resampled from (1, 144, 32) to (1, 196, 32)" in note for note in notes)
    grid = there.position_embedding.weight.detach().reshape(1, 12, 12, 32).permute(0, 3, 1, 2)
    expected = F.interpolate(grid, size=(14, 14), mode="bicubic", align_corners=False).permute(0, 2, 3, 1).flatten(1, 2)
    torch.testing.assert_close(here.position_embedding.weight.detach(), expected)
    assert torch.equal(here.blocks[0].layer_scale1, there.blocks[0].layer_scale1)


def test_the_authors_names_both_ways() -> None:
    """Guards against published weights that do not load: gamma_1 and gamma_2 of each block, 196 positions."""
    model = spread(small())
    theirs = reference_state_dict(model)
    assert {"blocks.0.gamma_1", "blocks.2.gamma_2", "cls_token", "pos_embed", "patch_embed.proj.weight"} <= theirs.keys()
    again = load_reference_state_dict(small(), {name: value.clone() for name, value in theirs.items()}).eval()
    images = torch.randn(2, 3, 48, 48)
    assert torch.equal(again(images), model(images))


def test_features_of_any_size() -> None:
    """Guards against a feature form that keeps the class token among the patches."""
    (map_,) = create_model("deit3_s", features=True, image_size=48).eval()(torch.randn(1, 3, 64, 32))
    assert map_.shape == (1, 384, 4, 2)


def test_a_size_that_no_patches_fit_is_refused() -> None:
    """Guards against a foreign traceback."""
    with pytest.raises(UserError, match="model.image_size must be a multiple of 16 and at least 16, got 200"):
        small(200)
