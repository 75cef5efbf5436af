"""Teachers of torchvision and timm: their weights, their normalization, and a sentence for whatever does not fit."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from pipeline.checkpoint.folder import latest_step
from pipeline.cluster.world import World
from pipeline.config import Config, DataConfig, ModelConfig, TrainConfig, load_config
from pipeline.errors import UserError, install_extra
from pipeline.inference.teacher import LibraryTeacher, describe_teacher, load_teacher
from pipeline.training.folder import check_same_run
from support.ranks import Job, run_forked
from support.runs import step_rows

CPU = torch.device("cpu")
SMALLEST = {"torchvision": "regnet_y_400mf", "timm": "regnety_002"}  # of the family of the paper's teacher


def library(name: str) -> object:
    """torchvision or timm, or a skip with the reason why it does not load here."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    try:
        return importlib.import_module(name)
    except Exception as error:  # torchvision's operators are of another build of PyTorch
        pytest.skip(f"{name} does not load beside PyTorch {torch.__version__}: {error}")


def network(name: str, classes: int = 10) -> nn.Module:
    """The small network of a library with random weights, in eval mode."""
    module = library(name)
    torch.manual_seed(0)
    if name == "timm":
        return module.create_model(SMALLEST[name], num_classes=classes).eval()
    return module.models.get_model(SMALLEST[name], weights=None, num_classes=classes).eval()


def config(teacher: str, weights: Path | None, size: int = 32, **data: object) -> Config:
    return Config(
        output_dir="run",
        model=ModelConfig(num_classes=10, image_size=size),
        data=DataConfig(**data),
        train=TrainConfig(teacher=teacher, teacher_weights=str(weights), precision="fp32"),
    )


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A file with the weights of torchvision's small network."""
    torch.save(network("torchvision").state_dict(), tmp_path / "regnet.pth")
    return tmp_path / "regnet.pth"


@pytest.mark.parametrize("name", SMALLEST)
def test_a_teacher_decides_as_its_network(name: str, tmp_path: Path) -> None:
    """Guards against weights that are left out, training mode, and gradients into the teacher; the file may hold a training
    checkpoint, as that of DeiT's authors does."""
    reference = network(name)
    torch.save({"model": reference.state_dict()}, tmp_path / "w.pth")
    images = torch.randn(2, 3, 32, 32, requires_grad=True)
    chosen = config(f"{name}:{SMALLEST[name]}", tmp_path / "w.pth")
    scores = load_teacher(chosen, CPU, [*"0123456789"])(images)
    assert not scores.requires_grad
    assert torch.equal(scores, reference(images).detach())
    assert "w.pth, which does not name its classes" in describe_teacher(chosen.train)


def test_images_are_normalized_for_the_teacher() -> None:
    """Guards against a teacher that sees a run's images with other colours than those it was trained on."""
    mean, std, run_mean, run_std = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3), (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    pixels = torch.rand(2, 3, 4, 4)
    theirs, ours = ((pixels - torch.tensor(m).view(3, 1, 1)) / torch.tensor(s).view(3, 1, 1) for m, s in ((mean, std), (run_mean, run_std)))  # fmt: skip
    teacher = LibraryTeacher(nn.Identity(), mean, std, run_mean, run_std)
    torch.testing.assert_close(teacher(ours), theirs, rtol=1e-5, atol=1e-5)
    same = LibraryTeacher(nn.Identity(), mean, std, mean, std)
    assert same(ours) is ours, "equal normalizations must not round"


def test_a_library_that_is_missing_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a traceback where the extra is not installed, or is of another build of PyTorch."""
    for name in ("torchvision", "timm"):

        def missing(library: str) -> None:
            raise ModuleNotFoundError(f"No module named {library!r}", name=library)

        def broken(library: str) -> None:
            raise RuntimeError("operator torchvision::nms does not exist\nand more")

        chosen = config(f"{name}:x", tmp_path / "w.pth")
        monkeypatch.setattr(importlib, "import_module", missing)
        with pytest.raises(
            UserError,
            match=f"requires {name}, which is not installed: {re.escape(install_extra(name))}",
        ):
            load_teacher(chosen, CPU)
        monkeypatch.setattr(importlib, "import_module", broken)
        with pytest.raises(UserError, match=r"which cannot be imported \(operator torchvision::nms does not exist\): "):
            load_teacher(chosen, CPU)
        monkeypatch.undo()


def test_a_teacher_and_its_weights_go_together(tmp_path: Path) -> None:
    """Guards against a network with random weights as teacher, and against a weight file that nothing reads."""
    (tmp_path / "x.yaml").write_text("output_dir: runs/x\n")
    for overrides, sentence in (
        (["train.teacher=torchvision:regnet_y_16gf"], "train.teacher=torchvision:regnet_y_16gf requires train.teacher_weights, got null: name a local file"),
        (["train.teacher_weights=w.pth"], "train.teacher_weights w.pth requires train.teacher torchvision:NAME or timm:NAME, got null"),
        (["train.teacher=runs/a", "train.teacher_weights=w.pth"], "requires train.teacher torchvision:NAME or timm:NAME, got runs/a"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=sentence):
            load_config(tmp_path / "x.yaml", overrides)


def test_a_run_keeps_its_teacher() -> None:
    """Guards against a run that goes on with another network or another file without a word."""
    world = World(0, 1, CPU, 1)
    begun = config("torchvision:regnet_y_16gf", Path("a.pth"))
    check_same_run(begun, begun, world)
    for other, key in ((config("timm:regnety_160", Path("a.pth")), "teacher"), (config("torchvision:regnet_y_16gf", Path("b.pth")), "teacher_weights")):  # fmt: skip
        with pytest.raises(UserError, match=f"was started with train.{key}="):
            check_same_run(other, begun, world)
        accepted = other.model_copy(update={"checkpoint": other.checkpoint.model_copy(update={"accept": [f"train.{key}"]})})
        check_same_run(accepted, begun, world)


def test_what_does_not_fit_is_one_sentence(weights: Path, tmp_path: Path) -> None:
    """Guards against tracebacks for a wrong name, file, number of classes or image size."""
    name = f"torchvision:{SMALLEST['torchvision']}"
    (tmp_path / "noise.pth").write_bytes(b"noise")
    torch.save(network("torchvision", classes=7).state_dict(), tmp_path / "seven.pth")
    state = torch.load(weights)
    torch.save({**state, "fc.bias": state["fc.bias"] * float("nan")}, tmp_path / "nan.pth")
    torch.save({**{k: v for k, v in state.items() if k != "fc.bias"}, "head.bias": state["fc.bias"]}, tmp_path / "keys.pth")
    for chosen, sentence in (
        (config(name, tmp_path / "absent.pth"), "train.teacher_weights must be a file with the weights of torchvision:.*, got .*absent.pth, which is not a file"),
        (config(name, tmp_path / "noise.pth"), "train.teacher_weights .*noise.pth cannot be read"),
        (config(name, tmp_path / "seven.pth"), r"with 10 classes, got tensors .*2 of another shape \(fc.weight \(7, 440\) instead of \(10, 440\)"),
        (config(name, tmp_path / "keys.pth"), r"1 missing \(fc.bias\), 1 unknown \(head.bias\), 0 of another shape: pass"),
        (config(name, tmp_path / "nan.pth"), "has values that are not finite in 1 of "),
        (config("torchvision:regnet_y_400m", weights), "must name a classifier of torchvision, got .*: did you mean torchvision:regnet_y_400mf"),
        (config("torchvision:fasterrcnn_resnet50_fpn", weights), "must name a classifier of torchvision"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=sentence):
            load_teacher(chosen, CPU)
    library("timm")
    with pytest.raises(UserError, match="must name a classifier of timm"):
        load_teacher(config("timm:hf_hub:a/b", weights), CPU)
    with pytest.raises(
        UserError, match=r"must be a model that timm makes, got timm:regnety_002.nothing \(.*\): leave out the tag"
    ):
        load_teacher(config("timm:regnety_002.nothing", weights), CPU)


def test_a_size_the_network_does_not_take_is_one_sentence(tmp_path: Path) -> None:
    """Guards against a traceback in the first step: a plain ViT is made for one size."""
    vit = library("timm").create_model("vit_tiny_patch16_224", num_classes=10)
    torch.save(vit.state_dict(), tmp_path / "vit.pth")
    with pytest.raises(
        UserError,
        match=r"must take images of 32 x 32 pixels, got timm:vit_tiny_patch16_224, which does not \(Input height \(32\) doesn",
    ):
        load_teacher(config("timm:vit_tiny_patch16_224", tmp_path / "vit.pth"), CPU)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_student_learns_the_networks_decisions(precision: str, weights: Path, small_run: Path, tmp_path: Path) -> None:
    """Guards against a teacher that changes nothing, and one that a resumed run exchanges or loses."""
    arguments = ["--config", small_run, "model.name=deit_t", f"train.precision={precision}"]
    teacher = [f"train.teacher=torchvision:{SMALLEST['torchvision']}", f"train.teacher_weights={weights}"]
    run_forked("pipeline.train", *arguments, f"output_dir={tmp_path / 'alone'}", "train.max_steps=2")
    taught = [*arguments, f"output_dir={tmp_path / 'taught'}"]
    run_forked("pipeline.train", *taught, *teacher, "train.max_steps=1")
    refused = run_forked("pipeline.train", *taught, "train.max_steps=2", check=False)
    assert refused.returncode == 2 and "was started with train.teacher=torchvision:regnet_y_400mf" in refused.stderr
    run_forked("pipeline.train", *taught, *teacher, "train.max_steps=2")
    run_forked("pipeline.train", *arguments, f"output_dir={tmp_path / 'whole'}", *teacher, "train.max_steps=2")
    losses = {run: [row["loss"] for row in step_rows(tmp_path / run)] for run in ("alone", "taught", "whole")}
    assert losses["taught"] == losses["whole"]
    assert all(a != t for a, t in zip(losses["alone"], losses["taught"]))


def test_two_ranks_are_taught_as_one(weights: Path, small_run: Path, tmp_path: Path) -> None:
    """Guards against a teacher that differs between ranks, and a killed run of two that goes on otherwise than one that was not."""
    teacher = [f"train.teacher=torchvision:{SMALLEST['torchvision']}", f"train.teacher_weights={weights}"]
    arguments = ["--config", small_run, "model.name=deit_t", *teacher, "train.max_steps=4", "checkpoint.every_steps=2"]
    run_forked("pipeline.train", *arguments, f"output_dir={tmp_path / 'one'}")
    run_forked("pipeline.train", *arguments, f"output_dir={tmp_path / 'two'}", processes=2)
    killed = tmp_path / "killed"
    job = Job(2, *arguments, f"output_dir={killed}", "train.max_steps=400")
    assert job.until(lambda: latest_step(killed) is not None), job.outputs()
    job.kill()
    job.wait()
    after = latest_step(killed) + 2
    resumed = run_forked("pipeline.train", *arguments, f"output_dir={killed}", f"train.max_steps={after}", processes=2)
    assert "resum" in resumed.stdout.lower()
    one, two, again = ([row["loss"] for row in step_rows(tmp_path / run)] for run in ("one", "two", "killed"))
    assert len(two) == 4 and len(again) == after
    assert again[:4] == two
    assert two == pytest.approx(one, rel=1e-5)
