"""docs/finetune.md: its commands make a model that is right, from a folder of images and weights that others have published."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from pipeline.checkpoint.weights import read_weights
from pipeline.errors import UserError
from pipeline.models import create_model, reference_state_dict
from pipeline.models.timm.names import weights_folder
from support.doc_commands import called_module, find_commands
from support.fake_hub import FakeHub
from support.launching import REPOSITORY
from support.precisions import FP32
from support.ranks import run_forked

PAGE = "docs/finetune.md"
WEIGHTS = "deit_tiny_patch16_224-a1311bcf.pth"  # which the page downloads
# What the page's words mean on a laptop: small images, and steps instead of epochs.
QUICKER = ["model.image_size=32", f"train.precision={FP32}", "train.global_batch_size=16", "train.micro_batch_size=16"]
QUICKER += ["train.max_steps=60", "optim.lr=2e-3", "optim.warmup_epochs=0.2", "data.num_threads=1", "data.flip=0"]


@pytest.fixture(scope="module")
def place(digits_images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a user stands: two kinds of digits as photos of two classes, one of them as PNG, and a file as DeiT's authors publish theirs."""
    folder = tmp_path_factory.mktemp("user")
    for digit, name in (("0", "cat"), ("1", "dog")):
        (folder / "photos" / name).mkdir(parents=True)
        for file in sorted((digits_images / "train" / digit).iterdir())[:60]:
            shutil.copy(file, folder / "photos" / name)
    from PIL import Image

    for file in sorted((folder / "photos" / "dog").iterdir())[::2]:
        Image.open(file).save(file.with_suffix(".png"))
        file.unlink()
    model = create_model("deit_t")  # the authors' layout, with weights of nobody
    torch.save({"model": reference_state_dict(model)}, folder / WEIGHTS)
    shutil.copytree(REPOSITORY / "configs", folder / "configs")
    return folder


@pytest.mark.long
def test_its_three_commands_make_a_model_that_is_right(place: Path) -> None:
    """Guards against a page whose commands do not fit each other: paths, names of runs, classes, the head."""
    download, *commands = [command.words for command in find_commands(PAGE)][:4]
    assert download[0] == "curl" and download[-1].endswith(f"/{WEIGHTS}")
    called = [called_module(words) for words in commands]
    assert [each[0] for each in called if each] == ["data_prep.shard_imagenet", "pipeline.train", "pipeline.predict"]
    said = []
    for module, words in filter(None, called):
        more = QUICKER if module == "pipeline.train" else []
        done = run_forked(module, *words, *more, folder=place)
        said.append(done.stdout + done.stderr)
    assert "108 images of 2 classes" in said[0]
    assert sum(map(int, re.findall(r"non-JPEG images unchanged: (\d+) png", said[0]))) == 30
    assert f"init_from: 152 tensors of {WEIGHTS}" in said[1]
    assert "head.weight is initialized from scratch: (1000, " in said[1]
    assert read_weights(place / "runs" / "finetune_folder").state.classes == ["cat", "dog"]
    rows = list(csv.DictReader(io.StringIO((place / "predictions.csv").read_text())))
    right = sum(Path(row["file"]).parent.name == row["top1_name"] for row in rows)
    assert len(rows) == 120 and right > 110, "half of them by chance"
    assert re.search(rf"top-1 +[\d.]+ % +{right} of 120 right", said[2])


def test_timms_weights_of_the_hub_are_a_start(
    place: Path, digits_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against the page's first row: weights that are not found in the hub, are downloaded again, or do not fit; and a traceback
    of an HTTP client on a node without network."""
    pytest.importorskip("huggingface_hub", reason="huggingface_hub (extra `hub`) is not installed")
    source, repository = "timm:deit_tiny_patch16_224", "timm/deit_tiny_patch16_224.fb_in1k"
    assert f"train.init_from={source}" in (REPOSITORY / PAGE).read_text()
    config = {"architecture": source.removeprefix("timm:"), "num_classes": 1000, "pretrained_cfg": {"num_classes": 1000}}
    weights = torch.load(place / WEIGHTS)["model"]
    environment = {"HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
    run = [
        "--config",
        "finetune_folder",
        f"data.path={digits_shards}",
        "model.num_classes=10",
        "model.name=deit_t",
        "output_dir=runs/from_hub",
        *QUICKER,
    ]
    run += [f"train.init_from={source}", "--dry-run"]
    with FakeHub() as hub:
        hub.repositories[repository] = {"config.json": json.dumps(config).encode(), "model.safetensors": save(weights)}
        said = run_forked("pipeline.train", *run, folder=place, HF_ENDPOINT=hub.endpoint, **environment).stdout
    assert (
        f"init_from: {len(weights)} tensors of {source}" in said and "head.weight is initialized from scratch: (1000, " in said
    )
    cached = run_forked("pipeline.train", *run, folder=place, HF_ENDPOINT="http://127.0.0.1:9", **environment).stdout
    assert f"init_from: {len(weights)} tensors of {source}" in cached
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for name, sentence in (
        (
            "timm:deit_small_patch16_224",
            "cannot be downloaded from https://huggingface.co/timm/deit_small_patch16_224.fb_in1k (",
        ),
        ("timm:resnet18", "train.init_from must name weights as timm:NAME.TAG, got timm:resnet18: take a name of"),
    ):
        with pytest.raises(UserError, match=re.escape(sentence)):
            weights_folder(name)
