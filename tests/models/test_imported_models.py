"""``model.name=module:build``: a network of somebody else's code as a model of ours, and a sentence for each that cannot be one."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

from pipeline.checkpoint.weights import describe
from pipeline.config import OptimConfig, config_from_dict
from pipeline.errors import UserError
from pipeline.exporting.graph import trace
from pipeline.inference.trained import load
from pipeline.models import create_model, load_pretrained, registry
from pipeline.models.flops import count
from pipeline.models.registry import installed_models
from pipeline.models.weights.exported import write_exported
from pipeline.models.weights.timm_folder import timm_form
from pipeline.optim.build import parameter_groups
from pipeline.optim.description import MATRICES
from support.subjects import subject_of
from support.their_nets import Net

NET = "support.their_nets:Net"


def test_it_draws_from_the_stream_and_keeps_its_weights_names() -> None:
    """Guards against stochastic depth of an unknown class that a restart draws anew, and dropout that is not seeded."""
    images = torch.randn(6, 3, 16, 16)
    model = create_model(NET, 5, 16, 0.5, switches={"width": 4, "dropout": 0.5}).train()
    assert model.noise_per_sample == 2 and model.draws_from_generator and model.head_names == ("net.fc.",)
    assert {f"net.{name}" for name in Net(5).state_dict()} == model.state_dict().keys()
    noise = torch.tensor([[0.1, 0.9], [0.9, 0.1]]).repeat(3, 1)  # (B, branches)
    model.generator_seed = 3
    first = model(images, noise)
    torch.manual_seed(1)
    assert torch.equal(model(images, noise), first) and not torch.equal(model(images, 1 - noise), first)
    theirs = Net(5, width=4).train()
    theirs.load_state_dict(model.net.state_dict())
    for block, column in zip(theirs.blocks, noise.T):
        block.drop_path = torch.nn.Identity()
        block.register_forward_hook(lambda _, x, y, column=column: x[0] + (y - x[0]) * 2 * (column >= 0.5).view(-1, 1, 1, 1))
    model.net.dropout.p = 0.0
    torch.testing.assert_close(model(images, noise), theirs(images))
    assert not create_model(NET, 5, 16).draws_from_generator


def test_what_others_ask_of_a_model_works_with_it() -> None:
    """Guards against weights, groups, counts and graphs that know timm's models and ours alone."""
    model = create_model("support.their_nets:small", 5, 16)
    weights = Net(7).state_dict()
    said = load_pretrained(model, weights, "theirs.pth")
    assert any("net.fc.weight is initialized from scratch: (7, 8) there" in sentence for sentence in said)
    assert torch.equal(model.net.stem.weight, weights["stem.weight"])
    config = config_from_dict({"model": {"name": NET}}, "the test")
    assert sum(len(group["params"]) for group in parameter_groups(model, config.optim)) == len(list(model.parameters()))
    matrices = [group for group in parameter_groups(model, OptimConfig(name="muon")) if group[MATRICES]]
    assert matrices and not {"net.stem.weight", "net.fc.weight"} & {name for group in matrices for name in group["names"]}
    row = count(NET, 16, 5)
    assert row.params == sum(p.numel() for p in Net(5).parameters()) and row.gmacs > 0
    trace(subject_of(create_model(NET, 5, 16), NET, 16, 5))
    with pytest.raises(UserError, match="--format timm is for models of this project and of timm, got support.their_nets:Net"):
        timm_form(NET, {})


@pytest.mark.parametrize(
    ("name", "model", "sentence"),
    [
        ("no_such_module:net", {}, "model.name must be a function or class that can be imported, as module:build, got no_such_module:net (Mod"),
        ("support.their_nets:gone", {}, "(AttributeError: module 'support.their_nets' has no attribute 'gone'): correct it, or put"),
        ("torch:float32", {}, "model.name must be a function or class with an argument num_classes, got torch:float32: add the argument."),
        ("support.their_nets:nothing", {}, "model.name must give a torch.nn.Module, got dict of support.their_nets:nothing"),
        ("support.their_nets:torso", {}, "in training it must give (2, 5) for 2 images, got (2, 6)"),
        ("support.their_nets:same", {}, "support.their_nets:same gives the same stem.weight at each call"),
        ("support.their_nets:tied", {}, "has blocks.1.conv.weight, which it has under another name too: shared weights are not saved"),
        ("support.their_nets:lazy", {}, "has 1.weight, whose shape is not known before a forward pass"),
        ("support.their_nets:half", {}, "has stem.weight, which is not of float32"),
        ("support.their_nets:Counts", {}, "changes its buffer seen in a forward pass, which would differ between processes"),
        (NET, {"switches": {"depth": 3}}, "(TypeError: Net.__init__() got an unexpected keyword argument 'depth'): correct model.options"),
        (NET, {"switches": {"drop_path": 0.1}}, "model.options must not have drop_path, which model.drop_path sets: remove it."),
        (NET, {"activation_checkpointing": True}, "train.activation_checkpointing is true, but support.their_nets:Net has none"),
        ("support.their_nets:small", {"image_size": 18}, "(AssertionError: the sides must be multiples of 4): correct model.options"),
        ("support.their_nets:same", {"drop_path": 0.1}, "model.drop_path is 0.1, but support.their_nets:same has no argument drop_path"),
        ("torch.nn:Linear", {}, "model.name must be a function or class with an argument num_classes, got torch.nn:Linear"),
        ("nets:", {}, "model.name must be timm:NAME, module:build or one of convit_b, "),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_one_sentence(name: str, model: dict, sentence: str) -> None:
    """Guards against a run that fails in its first step, or whose checkpoint is not the model."""
    with pytest.raises(UserError, match=re.escape(sentence)):
        create_model(name, 5, **{"image_size": 16, **model})


def test_a_file_runs_no_code_of_its_own_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a downloaded file that names what to import."""
    file = tmp_path / "net.safetensors"
    tree = {"model": {"name": NET, "num_classes": 2, "image_size": 16, "options": {"width": 4}}, "train": {"precision": "fp32"}}
    description = describe(config_from_dict(tree, "the test"), ["cat", "dog"], 1, "model", "ours")
    model = create_model(NET, 2, 16, switches={"width": 4})
    write_exported(file, model.state_dict(), description)
    with pytest.raises(UserError, match=f"{NET}, whose code would run: set PERVIT_TRUSTED_MODELS={NET} if you trust it"):
        load(file)
    monkeypatch.setenv(registry.TRUSTED, f"other:net,{NET}")
    loaded, _, classes = load(file)
    assert classes == ["cat", "dog"] and torch.equal(loaded.net.stem.weight, model.net.stem.weight)


def test_a_package_brings_models_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a group of entry points that nothing reads."""
    points = {"pervit.models": [EntryPoint("their_net", NET, "pervit.models")]}
    monkeypatch.setattr("pipeline.models.registry.entry_points", lambda group: points[group])
    installed_models.cache_clear()
    try:
        assert isinstance(create_model("their_net", 3, 16).net, Net)
        registry.check_trusted("their_net", "a file")  # its owner has installed it
    finally:
        installed_models.cache_clear()
