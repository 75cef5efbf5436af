"""This project's models behave in timm as timm's own do."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

timm = pytest.importorskip("timm", reason="timm (extra `timm`) is not installed")

import pipeline.models.for_timm as ours  # noqa: E402
from pipeline.errors import UserError  # noqa: E402
from pipeline.models import create_model, list_models, reference_state_dict  # noqa: E402

SIZES = {"pervit_t": 64, "convit_ti": 32, "deit_t": 32, "lsat_t_32": 32, "posmlp_t": 32, "gmlp_s": 32}


def test_timm_knows_every_model() -> None:
    """Guards against a model that is left out, and against one of timm's own that is replaced."""
    assert set(list_models()) <= set(timm.list_models())
    assert {timm.is_model(name) for name in ("convit_tiny", "deit_tiny_patch16_224", "gmlp_s16_224")} == {True}
    assert timm.models.model_entrypoint("convit_tiny").__module__ == "timm.models.convit"


@pytest.mark.parametrize("name", SIZES)
def test_the_interface_that_users_of_timm_expect(name: str) -> None:
    """forward is forward_head of forward_features; a classifier can be replaced and removed; names of weights are ours."""
    model = timm.create_model(name, num_classes=7, img_size=SIZES[name]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    plain = create_model(name, 7, SIZES[name]).eval()
    plain.load_state_dict(model.state_dict())
    images = torch.randn(2, 3, SIZES[name], SIZES[name])
    with torch.no_grad():
        expected, features = plain(images), model.forward_features(images)
        assert torch.equal(model(images), expected)
        torch.testing.assert_close(model.forward_head(features), expected)
        pooled = model.forward_head(features, pre_logits=True)
        assert features.shape[-1] == model.num_features == model.head_hidden_size == pooled.shape[1] and len(pooled) == 2
        assert features.shape[1] - model.num_prefix_tokens > 0
        assert torch.equal(copy.deepcopy(model)(images), expected)
        last, maps = model.forward_intermediates(images)
        assert torch.equal(last, features) and model.forward_intermediates(images, 2, output_fmt="NLC")[1][1].shape[0] == 2
        said = [(each["num_chs"], SIZES[name] // each["reduction"]) for each in model.feature_info]
        assert [(each.shape[1], each.shape[2]) for each in maps] == said and len(said) >= 3
        for key in (model.default_cfg["first_conv"], model.default_cfg["classifier"]):
            assert f"{key}.weight" in model.state_dict()
        model.reset_classifier(0, "")
        assert torch.equal(model(images), features)
        model.reset_classifier(0)
        assert (model.num_classes, model(images).shape) == (0, pooled.shape)
        torch.testing.assert_close(model(images), pooled)
        model.reset_classifier(3)
        assert (model.num_classes, model(images).shape, model.get_classifier()) == (3, (2, 3), model.head)
    model.train()(images).sum().backward()  # also where a family drops elements of what the classifier sees
    model.set_grad_checkpointing()
    model.train()(images).sum().backward()
    assert model.no_weight_decay() == plain.no_weight_decay()


@pytest.mark.parametrize("name", SIZES)
def test_timms_layer_decay_finds_all_parameters(name: str) -> None:
    """Groups by depth: everything before the blocks first, head and norm last; guards against parameters at no depth."""
    from timm.models import group_parameters

    model = timm.create_model(name, img_size=SIZES[name])
    groups = group_parameters(model, model.group_matcher(), reverse=True)
    depth = {parameter: group for parameter, group in groups.items()}
    assert set(depth) == {key for key, _ in model.named_parameters()}
    assert depth["head.weight"] == max(depth.values()) and min(depth.values()) == 0
    first = next(key for key, _ in model.named_parameters() if key.startswith(("stem", "embedding", "patch_embedding")))
    assert depth[first] == 0


@pytest.mark.parametrize("name", SIZES)
def test_features_only(name: str) -> None:
    """Maps of the widths and strides that ``feature_info`` says."""
    size = SIZES[name]
    model = timm.create_model(name, img_size=size, features_only=True, feature_cls="getter").eval()
    with torch.no_grad():
        maps = model(torch.randn(1, 3, size, size))
    assert [each.shape[1] for each in maps] == model.feature_info.channels()
    assert [size // each.shape[2] for each in maps] == model.feature_info.reduction()
    last = timm.create_model(name, img_size=size, features_only=True, out_indices=(-1,)).eval()
    assert last.feature_info.channels() == model.feature_info.channels()[-1:]


def test_stochastic_depth_and_switches_are_arguments() -> None:
    model = timm.create_model("deit_t", img_size=32, drop_path_rate=0.5, switches={"relative_position": True}).train()
    assert model.drop_path_rates.max() == 0.5 and model.switches.relative_position
    assert isinstance(model.head, nn.Linear) and model.pretrained_cfg["architecture"] == "deit_t"


def test_the_authors_names_load_as_well() -> None:
    """What a checkpoint of the authors holds, given to timm as ``state_dict``."""
    source = create_model("pervit_t", 5, 32).eval()
    overlay = {"state_dict": reference_state_dict(source), "num_classes": 5}
    model = timm.create_model("pervit_t", pretrained=True, num_classes=5, img_size=32, pretrained_cfg_overlay=overlay).eval()
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(model(images), source(images))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"in_chans": 1}, "in_chans=1, but takes square images of 3 channels"),
        ({"img_size": (32, 64)}, r"img_size=\(32, 64\), but takes square images"),
        ({"drop_rate": 0.1}, "drop_rate=0.1"),
        ({"global_pool": "max"}, "global_pool is 'max', but this model has 'avg' alone"),
        ({"switches": {"nonsense": 1}}, "nonsense"),
    ],
)
def test_what_a_model_cannot_do_is_one_sentence(arguments: dict, said: str) -> None:
    with pytest.raises(UserError, match=said):
        timm.create_model("pervit_t", **arguments)


def test_a_model_of_ours_keeps_its_class() -> None:
    """The interface is mixed in: what checks for a family still finds it."""
    from pipeline.models.pervit.model import PerViT

    assert isinstance(ours.for_timm(create_model("pervit_t", 5, 32)), PerViT)
