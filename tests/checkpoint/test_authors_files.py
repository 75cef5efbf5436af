"""A state dict that says nothing of its model, as authors publish them, is recognised by its tensors."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pipeline.errors import UserError
from pipeline.inference.trained import read_trained
from pipeline.models import create_model, reference_state_dict
from pipeline.models.common.base import VisionModel
from support.ranks import run_forked
from support.timm_folders import scores

SIZES = {"pervit_s": 224, "convit_ti_plus": 64, "deit_t": 96, "lsat_t_32": 32, "posmlp_t": 224, "gmlp_s": 224}


def network(name: str, size: int = 32, classes: int = 10) -> VisionModel:
    """With random weights."""
    torch.manual_seed(0)
    return create_model(name, classes, size).eval()


@pytest.mark.parametrize("name", SIZES)
def test_every_family_is_recognised(name: str, tmp_path: Path) -> None:
    """Guards against the wrong model, size or number of classes; position embeddings tell the size, else it is the paper's."""
    model = network(name, SIZES[name], 7)
    torch.save({"model": reference_state_dict(model), "args": Namespace(lr=1e-3), "epoch": 299}, tmp_path / "theirs.pth")
    trained = read_trained(tmp_path / "theirs.pth")
    its = trained.config.model
    assert (its.name, its.image_size, its.num_classes, trained.named) == (name, SIZES[name], 7, False)
    assert trained.config.data.eval_crop == {"lsat_t_32": 1.0, "posmlp_t": 0.9, "gmlp_s": 0.9}.get(name, 0.875)
    assert f"by its tensors, {name} for {SIZES[name]} pixels" in trained.assumed and "\n" not in trained.assumed
    assert all(torch.equal(value, trained.weights[key]) for key, value in model.state_dict().items())


def test_our_own_names_without_a_description(tmp_path: Path) -> None:
    model = network("convit_ti")
    save_file(model.state_dict(), tmp_path / "plain.safetensors")
    trained = read_trained(tmp_path / "plain.safetensors")
    assert trained.config.model.name == "convit_ti"
    assert torch.equal(scores(trained.build_model()), scores(model))


def test_what_is_of_no_model_says_what_comes_closest(tmp_path: Path) -> None:
    weights = reference_state_dict(network("deit_t"))
    del weights["blocks.3.mlp.fc1.bias"]
    for content, said in (
        (weights, "deit_t comes closest, but for 1 of them"),
        ({"w": torch.zeros(3)}, "must describe its model or have the tensors of a model .*, got 1 others"),
    ):
        torch.save(content, tmp_path / "w.pth")
        with pytest.raises(UserError, match=said):
            read_trained(tmp_path / "w.pth")
    with pytest.raises(UserError, match="leave out --step and --weights"):
        read_trained(tmp_path / "w.pth", step=3)


def test_evaluate_and_predict_take_it(digits_shards: Path, digits_images: Path, tmp_path: Path) -> None:
    """On shards and on a folder of images alike, whose classes are taken for the model's, which has as many; and said so."""
    torch.save(reference_state_dict(network("convit_ti")), tmp_path / "theirs.pth")
    results = {}
    for data in (digits_shards, digits_images):
        out = tmp_path / f"{data.name}.json"
        ended = run_forked("pipeline.evaluate", "--checkpoint", tmp_path / "theirs.pth", "--data", data, "--json", out)
        assert "does not name its classes" in ended.stderr
        results[data] = out.read_text().partition('"correct1"')[2].partition("class")[0]
    assert results[digits_shards] == results[digits_images]
    image = next(digits_images.rglob("*.JPEG"))
    run_forked("pipeline.predict", tmp_path / "theirs.pth", image, "--output", tmp_path / "rows.csv")
    assert (tmp_path / "rows.csv").read_text().count("\n") == 2
