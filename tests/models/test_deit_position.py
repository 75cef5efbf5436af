"""DeiT with PerViT's peripheral position encoding (PerViT, Table 2)."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipeline.errors import UserError
from pipeline.logs.pictures import peripheral_maps
from pipeline.models import create_model, flops
from pipeline.models.common.probe import recorded
from pipeline.models.common.vit import ViTLayout
from pipeline.models.deit import DeiT, DeiTSwitches
from support.two_steps import two_steps

SMALL = ViTLayout(heads=2, width=12, depth=3, mlp_ratio=2)
PIXELS = 64  # 4 x 4 patches


def small_model(peripheral: bool) -> DeiT:
    torch.manual_seed(0)
    return DeiT(SMALL, num_classes=5, image_size=PIXELS, switches=DeiTSwitches(peripheral_position=peripheral))


def test_the_switch_adds_phi_and_nothing_else() -> None:
    """Guards against Φp replacing a part of DeiT, and against a paper's count that moves (Table 2: 1.1 GMACs)."""
    with torch.device("meta"):
        plain, ours = (
            {name: p.shape for name, p in create_model("deit_t", switches={"peripheral_position": on}).named_parameters()}
            for on in (False, True)
        )
    added = {name for name in ours if "position." in name and name.startswith("blocks")} | {
        "distance_scales.weight",
        "distance_scales.bias",
    }
    assert ours.keys() - plain.keys() == added and {name: ours[name] for name in plain} == plain
    counted = flops.count("deit_t", switches={"peripheral_position": True})
    assert counted.gmacs_modules == pytest.approx(1.1, abs=0.05) and counted.params == 5_717_416 + counted.params_phi


def test_phi_weighs_the_patches_and_leaves_the_class_token_alone() -> None:
    """Guards against Φp on the wrong rows: attention is Normalize[exp(q k) Φp] with Φp = 1 to and from the class token."""
    model = small_model(peripheral=True).double().eval()
    images = torch.randn(2, 3, PIXELS, PIXELS, dtype=torch.float64)
    with torch.no_grad(), recorded("phi_p", "attention") as values:
        model(images)
        phi = model.log_phi((4, 4))[0].exp()  # (2, 16, 16)
    torch.testing.assert_close(values["phi_p"][0], phi)
    for block in model.blocks:
        nn.init.constant_(block.position.norm2.bias, 1e4)  # Φp = 1
    with torch.no_grad(), recorded("attention") as without:
        model(images)
    padded = torch.ones(2, 17, 17, dtype=torch.float64)
    padded[:, 1:, 1:] = phi
    expected = F.normalize(without["attention"][0] * padded, p=1, dim=-1)  # the first layer's content is the same
    torch.testing.assert_close(values["attention"][0], expected)


def test_with_phi_at_one_it_is_deit() -> None:
    """Guards against the switch changing more than the attention's weights."""
    ours, plain = small_model(peripheral=True).double().eval(), small_model(peripheral=False).double().eval()
    for block in ours.blocks:
        nn.init.constant_(block.position.norm2.bias, 1e4)
    plain.load_state_dict({name: value for name, value in ours.state_dict().items() if name in plain.state_dict()})
    images = torch.randn(2, 3, PIXELS, PIXELS, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), plain(images), rtol=1e-12, atol=1e-12)


def test_it_trains() -> None:
    """Guards against a Φp that is computed but gets no gradient; and against its picture missing from TensorBoard."""
    model = small_model(peripheral=True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    images = torch.randn(4, 3, PIXELS, PIXELS)
    two_steps(model, optimizer, [images] * 2, labels=[0, 1, 2, 3])
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert {"distance_scales.weight", "blocks.0.position.projection1.weight", "blocks.2.position.norm2.bias"} <= moved
    assert peripheral_maps(model.eval(), images.shape[-1]).shape == (3, 2, 4, 4)  # layers, heads, patches
    assert peripheral_maps(small_model(peripheral=False).eval(), images.shape[-1]) is None


def test_one_patch_has_no_distances() -> None:
    """Guards against a division by zero where the image is a single patch."""
    with pytest.raises(UserError, match="1 x 1 patches, but Φp requires at least 2 x 2"):
        create_model("deit_t", image_size=16, switches={"peripheral_position": True})
