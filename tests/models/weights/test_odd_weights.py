"""Files with weights from anywhere: what is odd about them is one sentence, never a traceback or a silent guess."""

from __future__ import annotations

import json
import struct
from argparse import Namespace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline import load
from pipeline.checkpoint.weights import read_initial_weights
from pipeline.cluster.world import World
from pipeline.config import config_from_dict
from pipeline.errors import UserError
from pipeline.inference.trained import read_trained
from pipeline.models import create_model, reference_state_dict
from pipeline.models.weights.exported import Description, read_exported, write_exported
from pipeline.models.weights.transfer import check_finite
from pipeline.training.building import build_model

WORLD = World(rank=0, size=1, device=torch.device("cpu"), cpu_threads=1)
SWITCHES = {"widths": [16, 16, 16, 16]}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound file."""
    file = tmp_path_factory.mktemp("exported") / "weights.safetensors"
    thirds = [0.3, 0.3, 0.3]
    description = Description(
        "pervit_t", 10, 32, SWITCHES, [*"0123456789"], thirds, thirds, 0.875, "fp32", step=1, weights="model", names="ours"
    )
    write_exported(file, create_model("pervit_t", 10, 32, switches=SWITCHES).state_dict(), description)
    load(file)
    return file


def described(exported: Path, target: Path, change) -> Path:
    """A copy of an exported file with another text as its description."""
    data = exported.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    tree = json.loads(header["__metadata__"]["description"])
    text = change(tree)
    header["__metadata__"]["description"] = json.dumps(tree) if text is None else text
    new = json.dumps(header).encode()
    new += b" " * (-len(new) % 8)
    target.write_bytes(struct.pack("<Q", len(new)) + new + data[8 + size :])
    return target


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: "[" * 3000 + "]" * 3000,
        lambda tree: "[]",
        lambda tree: "null",
        lambda tree: tree.update(image_size="32"),
        lambda tree: tree.update(image_size=10**9),
        lambda tree: tree.update(image_size=33),
        lambda tree: tree.update(num_classes=11),
        lambda tree: tree.update(num_classes=-10),
        lambda tree: tree.update(model=["pervit_t"]),
        lambda tree: tree.update(model="pervit_x"),
        lambda tree: tree.update(switches={"widths": "many"}),
        lambda tree: tree.update(switches=7),
        lambda tree: tree.update(classes=5),
        lambda tree: tree.update(classes=list(range(10))),
        lambda tree: tree.update(mean=[1, 2]),
        lambda tree: tree.update(std=[0, 0, 0]),
        lambda tree: tree.update(eval_crop=1e-9),
        lambda tree: tree.update(precision="fp7"),
        lambda tree: tree.update(names="theirs"),
        lambda tree: tree.update(more=1),
        lambda tree: tree.pop("step") and None,
    ],
)
def test_an_odd_description_is_one_sentence(change, exported: Path, tmp_path: Path) -> None:
    """Guards against a file from somewhere that ends in a traceback, or takes all memory."""
    file = described(exported, tmp_path / "odd.safetensors", change)
    for use in (read_exported, read_trained, load):
        with pytest.raises(UserError) as error:
            use(file)
        assert str(file) in str(error.value) and "\n" not in str(error.value) and "export it again" in str(error.value)


def nonsense() -> dict[str, object]:
    """By what is wrong with it: what a file with weights may hold."""
    good = create_model("pervit_t", 10, 32, switches={"widths": [16, 16, 16, 16]}).state_dict()
    name, weight = "head.weight", good["head.weight"]
    return {
        "integer keys": {index: value for index, value in enumerate(good.values())},
        "a list": list(good.values()),
        "a nested dict": {"model": {"state": good}},
        "nothing": {},
        "no tensor": 3,
        "text": {**good, name: "weights"},
        "integers": {**good, name: weight.to(torch.int64)},
        "complex": {**good, name: weight.to(torch.complex64)},
        "sparse": {**good, name: weight.to_sparse()},
        "meta": {**good, name: weight.to("meta")},
        "enormous": {**good, "blocks.0.norm1.weight": torch.zeros(1).expand(10**7, 10**9)},
        "not a number": {**good, "blocks.0.norm1.weight": torch.full((16,), torch.nan)},
        "infinite in fp32": {**good, name: torch.full(weight.shape, 1e300, dtype=torch.float64)},
    }


@pytest.mark.parametrize("wrong", nonsense())
def test_odd_weights_are_one_sentence(wrong: str, tmp_path: Path) -> None:
    """Guards against a traceback, weights of another type that are taken silently, and NaN that a training begins with."""
    torch.save(nonsense()[wrong], tmp_path / "weights.pt")
    config = config_from_dict(
        {
            "model": {"num_classes": 10, "image_size": 32, "switches": {"widths": [16, 16, 16, 16]}},
            "train": {"init_from": str(tmp_path / "weights.pt")},
        },
        source="",
    )
    with pytest.raises(UserError) as error:
        build_model(config, WORLD, [*"0123456789"], fresh=True)
    assert "weights.pt" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("form", ["names alone", "PerViT's checkpoint", "timm's checkpoint"])
def test_the_authors_files_are_taken(form: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Guards against published weights that the run refuses for their names, or for the command line that lies beside them."""
    theirs = create_model("pervit_t", 10, 32, switches=SWITCHES)
    weights = reference_state_dict(theirs)
    around = {"epoch": 3, "args": Namespace(lr=5e-4, device="cuda")}
    forms = {
        "names alone": weights,
        "PerViT's checkpoint": {"model": weights, "optimizer": {"state": {}}, **around},
        "timm's checkpoint": {"state_dict": weights, "arch": "pervit", **around},
    }
    file = tmp_path / "weights.pth"
    torch.save(forms[form], file)
    config = config_from_dict(
        {"model": {"num_classes": 10, "image_size": 32, "switches": SWITCHES}, "seed": 1, "train": {"init_from": str(file)}},
        source="",
    )
    ours = build_model(config, WORLD, [*"0123456789"], fresh=True).state_dict()
    assert all(torch.equal(value, ours[name]) for name, value in theirs.state_dict().items())
    said = capsys.readouterr().out
    assert "init_from: they have the names of the authors' code\n" in said and "check that they are yours" in said


def test_objects_beside_the_weights_are_one_sentence(tmp_path: Path) -> None:
    """Guards against PyTorch's advice to load a file in a way that runs what is in it."""
    torch.save({"model": {"w": torch.zeros(1)}, "metric": Fraction(1, 2)}, tmp_path / "weights.pth")
    with pytest.raises(
        UserError, match=r"cannot be read \(it also holds a fractions.Fraction, which could run code\): .* alone\.$"
    ):
        read_initial_weights(tmp_path / "weights.pth")


def test_a_file_that_changes_while_it_is_loaded(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a model half of one file and half of another, from a file that is mapped, or the end by SIGBUS."""
    file = tmp_path / "weights.safetensors"
    file.write_bytes(exported.read_bytes())

    def change_then_check(*arguments: object, **options: object) -> None:
        with open(file, "r+b") as opened:
            opened.seek(file.stat().st_size // 2)
            opened.write(bytes(file.stat().st_size // 2))
        check_finite(*arguments, **options)

    monkeypatch.setattr("pipeline.models.weights.exported.check_finite", change_then_check)
    found, expected = load(file)[0].state_dict(), load_file(exported)
    assert file.read_bytes() != exported.read_bytes()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_weights_that_are_not_finite_are_refused(exported: Path, tmp_path: Path) -> None:
    """Guards against an accuracy, or a file, of weights that compute nothing."""
    weights = load_file(exported)
    weights["head.bias"][3] = torch.nan
    with pytest.raises(UserError, match=r"not finite in 1 of \d+ tensors \(head.bias\)"):
        write_exported(tmp_path / "a.safetensors", weights, read_exported(exported)[1])
    assert not (tmp_path / "a.safetensors").exists()
    metadata = {"description": json.dumps(vars(read_exported(exported)[1]))}
    save_file(weights, tmp_path / "b.safetensors", metadata)
    for use in (load, read_trained):
        with pytest.raises(UserError, match="b.safetensors has values that are not finite"):
            use(tmp_path / "b.safetensors")
