"""Weights go to timm and come back: folders that we write, folders that timm writes, and damaged ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

from pipeline import load
from pipeline.cluster.world import World
from pipeline.config import config_from_dict
from pipeline.errors import UserError
from pipeline.exporting import weights_file
from pipeline.inference.trained import read_trained
from pipeline.models.weights.exported import read_exported
from pipeline.models.weights.timm_folder import read_timm_folder
from pipeline.training.building import build_model
from support.ranks import run_forked
from support.runs import write_small_config
from support.timm_folders import CLASSES, export_small, scores, small

SIZES = {"pervit_t": 32, "convit_ti": 32, "deit_t": 32, "lsat_t_32": 32, "posmlp_t": 32, "gmlp_s": 32}
OF_TIMM = {"convit_ti": "convit_tiny", "deit_t": "deit_tiny_patch16_224", "gmlp_s": "gmlp_s16_224"}
SWITCHES = {"pervit_t": "{widths: [16, 16, 16, 16]}"}
WORLD = World(rank=0, size=1, device=torch.device("cpu"), cpu_threads=1)


def library() -> ModuleType:
    """timm with this project's models, or a skip."""
    timm = pytest.importorskip("timm", reason="timm (extra `timm`) is not installed")
    import pipeline.models.for_timm  # noqa: F401

    return timm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported ConViT."""
    return export_small("convit_ti", tmp_path_factory.mktemp("folders") / "convit")


@pytest.mark.parametrize("name", SIZES)
def test_a_run_goes_to_timm_and_back(name: str, digits_shards: Path, tmp_path: Path) -> None:
    """Trained for two steps, exported, loaded by timm, and the beginning of another training."""
    timm = library()
    config = write_small_config(digits_shards, tmp_path)
    switches = f"model.switches={SWITCHES.get(name, '{}')}"
    arguments = (f"model.name={name}", switches, "train.max_steps=2", "train.ema_decay=0.9", "data.eval_crop=0.9")
    run_forked("pipeline.train", "--config", config, *arguments)
    trained = read_trained(tmp_path / "run")
    subject = small(name, 32, trained.config.model.switches)
    its = replace(subject.description, num_classes=10, classes=trained.classes, step=2, weights="ema")
    (tmp_path / "folder").mkdir()
    weights_file.export_timm(replace(subject, model=trained.build_model(), description=its), tmp_path / "folder")

    written = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert written["architecture"] == OF_TIMM.get(name, name)
    theirs = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True).eval()
    expected = scores(trained.build_model())
    assert (scores(theirs) - expected).abs().max() <= 1e-5 * max(expected.abs().max().item(), 1e-6)
    assert theirs.pretrained_cfg["label_names"] == trained.classes and theirs.num_features == written["num_features"]

    back = read_trained(tmp_path / "folder")
    assert (back.step, back.kind, back.classes, back.config.data.eval_crop) == (2, "ema", trained.classes, 0.9)
    assert torch.equal(scores(back.build_model()), expected)
    next_run = {"model": {"name": name, "image_size": 32, "num_classes": 10, "switches": dict(its.switches)}}
    started = config_from_dict({**next_run, "train": {"init_from": str(tmp_path / "folder")}}, source="a test")
    assert torch.equal(scores(build_model(started, WORLD, trained.classes, fresh=True).eval()), expected)


@pytest.mark.parametrize(
    ("name", "switches", "architecture", "arguments"),
    [
        ("convit_ti_plus", {"gpsa_layers": 3}, "convit_tiny", {"embed_dim": 64, "local_up_to_layer": 3}),
        ("convit_ti", {"locality_strength": 0.5}, "convit_tiny", {}),
        ("convit_ti", {"positional_gating": False}, "convit_ti", {"switches": {"positional_gating": False}}),
        ("convit_ti", {"mask_content_layers": 3}, "convit_ti", {"switches": {"mask_content_layers": 3}}),
        ("deit_ti_plus", {}, "deit_tiny_patch16_224", {"embed_dim": 256, "num_heads": 4}),
        ("deit_t", {"relative_position": True}, "deit_t", {"switches": {"relative_position": True}}),
        ("gmlp_s", {"mixing": "ggqpe"}, "gmlp_s", {"switches": {"mixing": "ggqpe"}}),
    ],
)
def test_what_timm_has_no_argument_for_keeps_our_name(
    name: str, switches: dict, architecture: str, arguments: dict, tmp_path: Path
) -> None:
    """Guards against a network of timm's that takes the weights and computes something else; export compares the scores, by timm
    where it is installed."""
    folder = export_small(name, tmp_path / "folder", 32, switches)
    config = json.loads((folder / "config.json").read_text())
    assert (config["architecture"], config.get("model_args", {})) == (architecture, arguments)
    model, description, named = read_timm_folder(folder)
    assert named and description.model == name
    assert torch.equal(scores(model), scores(small(name, 32, switches).model))


def test_the_weights_alone_say_what_they_are(folder: Path) -> None:
    """The folder's safetensors file has this project's description, so that it can travel without the folder."""
    assert torch.equal(scores(read_exported(folder / "model.safetensors")[0]), scores(small("convit_ti").model))


@pytest.mark.parametrize("size", [(300, 200), (97, 513), (32, 32), (20, 31), (640, 639)])
def test_timms_transform_gives_our_pixels(size: tuple[int, int], folder: Path) -> None:
    """Guards against a resize, a crop or a normalization that is not the evaluation's. Both resize as Pillow does: a pixel may
    differ by one of 255 steps where the two round differently."""
    timm = library()
    model = timm.create_model(f"local-dir:{folder}", pretrained=True)
    theirs = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    _, ours, _ = load(folder)
    pixels = np.random.default_rng(0).integers(0, 256, (size[1] // 4 + 1, size[0] // 4 + 1, 3), dtype=np.uint8)
    image = Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)
    difference = (theirs(image) - ours(image)).abs() * torch.tensor([0.2, 0.25, 0.3]).view(3, 1, 1) * 255
    assert difference.max() < 1.01 and (difference > 0.5).float().mean() < 0.02


@pytest.mark.parametrize(
    ("architecture", "ours", "arguments"),
    [
        ("convit_tiny", "convit_ti", {}),
        ("convit_tiny", "convit_ti_plus", {"embed_dim": 64, "local_up_to_layer": 4}),
        ("deit_tiny_patch16_224.fb_in1k", "deit_t", {}),
        ("vit_tiny_patch16_224", "deit_t", {}),
        ("gmlp_s16_224", "gmlp_s", {}),
    ],
)
@pytest.mark.parametrize("safe", [True, False])
def test_folders_of_timm(architecture: str, ours: str, arguments: dict, safe: bool, tmp_path: Path) -> None:
    """timm's own export, as safetensors or with torch.save, is read, without names of classes."""
    timm = library()
    from timm.models import save_for_hf

    if not safe and architecture != "convit_tiny":
        pytest.skip("one architecture is enough for torch.save")
    torch.manual_seed(1)
    model = timm.create_model(architecture, num_classes=5, img_size=32, drop_rate=0.1, **arguments).eval()
    torch.nn.init.normal_(model.head.weight)
    save_for_hf(model, tmp_path / "theirs", safe_serialization=safe)
    trained = read_trained(tmp_path / "theirs")
    assert trained.config.model.name == ours and not trained.named and trained.classes == [*"01234"]
    found, expected = scores(trained.build_model()), scores(model)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


# Without timm an architecture that is none of ours, with it weights that are of another one.
OTHER = "which this project does not have|does not fit TimmClassifier"


def edited(folder: Path, new: Path, **changes: object) -> Path:
    """A copy of a folder whose config.json has other values; a value of None removes the key."""
    new.mkdir()
    (new / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        place = config["pretrained_cfg"] if key in config["pretrained_cfg"] and key != "num_classes" else config
        place[key] = value
    (new / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return new


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architecture": None}, "config.json: architecture is missing"),
        ({"architecture": "resnet18"}, OTHER),
        ({"architecture": "deit_tiny_distilled_patch16_224"}, OTHER),
        ({"num_classes": 7}, "has 5 label_names for 7 classes"),
        ({"num_classes": 7, "label_names": None}, r"head.(weight|bias) \(5,.* instead of \(7,"),
        ({"label_names": ["a", "b"]}, "has 2 label_names for 5 classes: write 5 names"),
        ({"interpolation": "bilinear"}, "interpolation must be bicubic for an evaluation, got 'bilinear'"),
        ({"input_size": [3, 32, 64]}, r"input_size must be a square of 3 channels for an evaluation, got \[3, 32, 64\]"),
        ({"input_size": [3, 64, 64]}, r"of another shape \(.*position_embedding.weight"),
        ({"crop_pct": 1.2}, "crop_pct must be from 0.1 to 1 for an evaluation, got 1.2"),
        ({"std": [0, 1, 1]}, "config.json: pretrained_cfg.std.0 must be greater"),
        (
            {"model_args": {"embed_dim": 50}},
            "model_args of convit_tiny must be those of a model of this project, got embed_dim=50",
        ),
        ({"model_args": {"norm_layer": "x"}}, "model_args of .* got norm_layer='x'"),
        ({"architecture": "convit_small"}, "does not match its description of the model"),
        ({"architecture": "pervit_t", "model_args": {"switches": {"nonsense": 1}}}, "nonsense"),
    ],
)
def test_a_config_that_does_not_fit_is_one_sentence(changes: dict, said: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said) as error:
        read_trained(edited(folder, tmp_path / "edited", **changes))
    assert str(tmp_path / "edited") in str(error.value) and "\n" not in str(error.value)


def test_a_damaged_folder_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    """A file is missing, cut off or no JSON; the same for a start from it."""
    weights, config = ((folder / name).read_bytes() for name in ("model.safetensors", "config.json"))
    cases = {
        "config.json does not exist": {"model.safetensors": weights},
        "has no model.safetensors": {"config.json": config},
        "model.safetensors cannot be read": {"config.json": config, "model.safetensors": weights[:-1000]},
        "config.json cannot be read": {"config.json": config[:-40], "model.safetensors": weights},
        "config.json: the file must be": {"config.json": b"[1]", "model.safetensors": weights},
    }
    for number, (said, files) in enumerate(cases.items()):
        broken = tmp_path / str(number)
        broken.mkdir()
        for name, content in files.items():
            (broken / name).write_bytes(content)
        started = config_from_dict({"train": {"init_from": str(broken)}}, source="a test")
        for use in (lambda: read_trained(broken), lambda: build_model(started, WORLD, CLASSES, fresh=True)):  # noqa: B023
            with pytest.raises(UserError) as error:
                use()
            assert said in str(error.value) and "\n" not in str(error.value)


def test_a_run_starts_from_a_network_of_another_size(folder: Path) -> None:
    """``train.init_from`` needs the weights alone: other classes and another image size are as with any other weights."""
    next_run = {"model": {"name": "convit_ti", "image_size": 64, "num_classes": 3}, "train": {"init_from": str(folder)}}
    model = build_model(config_from_dict(next_run, source="a test"), WORLD, [*"xyz"], fresh=True)
    assert model.state_dict()["position_embedding.weight"].shape[1] == 16
    kept = small("convit_ti").model.state_dict()["blocks.0.attn.qk.weight"]
    assert torch.equal(model.state_dict()["blocks.0.attn.qk.weight"], kept)


def test_scores_that_differ_are_not_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check is a part of the export."""
    monkeypatch.setattr(
        weights_file, "_reader", lambda path: ("a test", lambda images: small("deit_t").model(images) * (1 + 2e-5))
    )
    with pytest.raises(UserError, match="must give the model's scores to 1e-05 of the largest .* got a difference of 2.0e-05"):
        export_small("deit_t", tmp_path / "folder")
