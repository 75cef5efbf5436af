"""Weights go out under the authors' names and come back, and the names are theirs exactly."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pipeline.errors import UserError
from pipeline.models import (
    create_model,
    list_models,
    load_pretrained,
    load_reference_state_dict,
    model_entry,
    reference_state_dict,
)
from pipeline.models.gated_mlp.posmlp import PosMLP, PosMLPSwitches
from support.deit_weights import published_weights
from support.golden import Golden


def on_meta(name: str, **options) -> nn.Module:
    """A model of the paper's sizes without memory for its weights."""
    entry = model_entry(name)
    with torch.device("meta"):
        return create_model(name, **{"num_classes": entry.num_classes, "image_size": entry.image_size, **options})


def shapes(state_dict: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(value.shape) for key, value in state_dict.items()}


VARIANTS = {
    "pervit_t": "pervit_tiny",
    "convit_ti": "convit_tiny",
    "lsat_t_32": "lsat_cifar_tiny",
    "lsat_t_224": "lsat_imagenet_tiny",
    "posmlp_t": "posmlp_t",
    "gmlp_s": "gmlp_s",
}


@pytest.mark.parametrize("name", VARIANTS)
def test_names_and_shapes_are_the_authors(name: str) -> None:
    """Guards against a file that the authors' own strict loading refuses: a name too many, too few, or of another shape."""
    assert shapes(reference_state_dict(on_meta(name))) == Golden(VARIANTS[name]).shapes()


def test_deits_names_are_the_authors() -> None:
    """Guards against the same in DeiT, of which there are no golden vectors."""
    assert shapes(reference_state_dict(on_meta("deit_t", num_classes=5, image_size=48))) == shapes(published_weights())


def test_types_are_the_authors() -> None:
    """Guards against tables and counters that come out as numbers of another kind."""
    kinds = {key: kind for key, _, kind, _ in Golden("posmlp_t").meta["keys"]}
    found = reference_state_dict(on_meta("posmlp_t"))
    assert {key: str(value.dtype).removeprefix("torch.") for key, value in found.items()} == kinds


def marked(model: nn.Module) -> nn.Module:
    """A model on the meta device gets weights that each hold a number of their own, in next to no memory."""
    numbered = enumerate(model.state_dict().items(), start=1)
    weights = {name: torch.tensor(i, dtype=value.dtype).expand(value.shape) for i, (name, value) in numbered}
    model.load_state_dict(weights, assign=True)
    return model


def assert_round_trip(name: str, **options) -> None:
    source = marked(on_meta(name, **options))
    target = on_meta(name, **options).to_empty(device="cpu")
    load_reference_state_dict(target, reference_state_dict(source))
    own, loaded = source.state_dict(), target.state_dict()
    assert own.keys() == loaded.keys()
    different = [key for key in own if (own[key].flatten()[:1] != loaded[key].flatten()[:1]).any()]
    assert not different


@pytest.mark.parametrize("name", list_models())
def test_every_model_reads_back_what_it_wrote(name: str) -> None:
    """Guards against names that lead to another layer on the way back, in variants without golden vectors too."""
    assert_round_trip(name)


@pytest.mark.parametrize("name", [*VARIANTS, "deit_t"])
def test_fine_tuning_takes_the_authors_names(name: str) -> None:
    """Guards against a family whose published weights load_reference_state_dict takes and fine-tuning does not."""
    source, target = marked(on_meta(name)), on_meta(name).to_empty(device="cpu")
    said = load_pretrained(target, reference_state_dict(source), "x.pth", ["a"], ["a"])
    assert said == ["they have the names of the authors' code", "the head is kept: its classes are the same"]
    loaded = target.state_dict()
    assert not [key for key, value in source.state_dict().items() if (value != loaded[key]).any()]


def test_fine_tuning_from_the_authors_takes_other_classes_and_another_size() -> None:
    """Guards against a head of other classes or a table of another size that is taken, or refused, for its name is the authors'."""
    source, target = (create_model("deit_t", classes, size) for classes, size in ((2, 32), (3, 64)))
    fresh = target.state_dict()["head.weight"].clone()
    said = load_pretrained(target, reference_state_dict(source), "x.pth", None, ["a", "b", "c"])
    assert said[0] == "they have the names of the authors' code" and "the head is loaded" not in " ".join(said)
    assert "head.weight is initialized from scratch: (2, 192) there, (3, 192) here" in said and torch.equal(
        target.head.weight, fresh
    )
    assert "position_embedding.weight is resampled from (1, 5, 192) to (1, 17, 192)" in said


def test_what_fits_neither_names_says_which_is_nearer() -> None:
    """Guards against a list of all names in a file of which one is wrong, and against advice that leaves out either way."""
    weights = reference_state_dict(create_model("deit_t", 2, 32))
    weights["cls"] = weights.pop("cls_token")
    with pytest.raises(UserError, match="x.pth does not fit DeiT under the names of the authors' code: 1 missing") as error:
        load_pretrained(create_model("deit_t", 2, 32), weights, "x.pth")
    assert "1 missing (cls_token), 1 unknown (cls), 0 of another shape" in str(error.value)
    assert "which may have this project's names or the names of the authors' code" in str(error.value)


@pytest.mark.parametrize(
    ("name", "switches"),
    [
        ("pervit_t", {"widths": [64, 96, 128, 160], "phi_p_frozen": True}),
        ("convit_ti", {"gpsa_layers": 4, "train_gating": False, "mask_position_embedding": True}),
        ("convit_ti", {"gpsa_layers": 0}),
        ("deit_t", {"mask_position_embedding": True}),
        ("deit_t", {"relative_position": True}),
        ("lsat_t_32", {"heads": 3, "kv_heads": "shared"}),
        ("posmlp_t", {"mixing": "sgu"}),
        ("posmlp_t", {"mixing": "glrpe", "norm": False, "groups": [4, 4, 4, 4]}),
        ("posmlp_t", {"covariance": "free", "windows": [28, 14, 14, 7], "shift_windows": True, "block_dropout": 0.0}),
    ],
)
def test_switches_that_the_authors_code_has_read_back_too(name: str, switches: dict) -> None:
    """Guards against an ablation that the authors' code could run but that cannot be handed over to it."""
    assert_round_trip(name, switches=switches)


@pytest.mark.parametrize(
    ("name", "switches", "culprit"),
    [
        ("pervit_t", {"conv_stem": False}, "conv_stem is False"),
        ("pervit_t", {"phi_p_distance": "learned"}, "phi_p_distance is 'learned'"),
        ("convit_ti", {"positional_gating": False}, "positional_gating is False"),
        ("deit_t", {"peripheral_position": True}, "peripheral_position is True"),
        ("deit_t", {"conditional_position": 5}, "conditional_position is 5"),
        ("lsat_t_32", {"kv_heads": "per_head"}, "kv_heads is 'per_head'"),
        ("lsat_t_224", {"shifts": "none"}, "shifts is 'none'"),
        ("posmlp_t", {"mixing": "lrpe_m"}, "mixing is 'lrpe_m'"),
        ("posmlp_t", {"mixing": "lrpe"}, "mixing is 'lrpe'"),
        ("posmlp_t", {"norm": True}, "norm is True"),
        ("posmlp_t", {"covariance": "isotropic"}, "covariance is 'isotropic'"),
        ("posmlp_t", {"token_bias": False}, "token_bias is False"),
        ("gmlp_s", {"mixing": "ggqpe"}, "mixing is 'ggqpe'"),
    ],
)
def test_what_the_authors_code_does_not_have_is_refused(name: str, switches: dict, culprit: str) -> None:
    """Guards against weights under names that the authors' code takes for another model's."""
    with pytest.raises(UserError, match=rf"^model\.switches\.{culprit}, .*: export the model under"):
        reference_state_dict(on_meta(name, switches=switches))


def test_the_tables_are_the_authors() -> None:
    """Guards against tables with which the authors' code would look elsewhere: y counts the other way than x there."""
    small = {"num_classes": 5, "image_size": 64}
    terms = reference_state_dict(PosMLP(16, **small))["levels.0.encoder.0.gate_unit.pos.rel_indices"]  # (16, 16, 5)
    assert terms[0, 4 * 2 + 3].tolist() == [3, -2, 9, 4, -6], "from (0, 0) to x = 3, y = 2"
    glrpe = PosMLP(16, switches=PosMLPSwitches(mixing="glrpe", norm=False), **small)
    index = reference_state_dict(glrpe)["levels.0.encoder.0.gate_unit.pos.window_relative_position_index"]  # (16, 16)
    assert index[0, 0] == 3 * 7 + 3 and index[0, 15] == 0 and index[15, 0] == 48


def test_a_file_of_them_can_be_written(tmp_path) -> None:
    """Guards against tensors that share memory, which the safetensors format refuses, and against values lost on the way."""
    model, other = (PosMLP(16, num_classes=5, image_size=64) for _ in range(2))
    save_file(reference_state_dict(model), tmp_path / "weights.safetensors")
    load_reference_state_dict(other, load_file(tmp_path / "weights.safetensors"))
    own, loaded = model.state_dict(), other.state_dict()
    assert all(torch.equal(own[name], loaded[name]) for name in own)
