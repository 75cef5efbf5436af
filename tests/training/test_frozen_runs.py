"""``train.freeze``: what is frozen stays as it is, has no optimizer state, is in every checkpoint, and a run with it resumes exactly."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from faults.history import same_files
from pipeline.checkpoint.folder import step_folder
from pipeline.checkpoint.manifest import CheckpointManifest
from pipeline.checkpoint.weights import read_weights
from pipeline.config import config_from_dict
from pipeline.errors import UserError
from pipeline.models import create_model, model_of
from pipeline.optim.build import parameter_groups
from support.ranks import run_forked
from support.small_run import SMALL_MODEL


@pytest.mark.multiprocess
def test_a_run_trains_the_rest_and_resumes_exactly(small_run: Path, tmp_path: Path) -> None:
    """Guards against frozen weights or statistics that move or are lost under DeepSpeed's engine, and state for them; for our own engine,
    ``test_imported_runs.py``."""
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    run = [
        "--config",
        small_run,
        *SMALL_MODEL,
        "train.zero_stage=1",
        'train.freeze=["stem", "blocks.0"]',
        "checkpoint.every_steps=1",
    ]
    run += ["train.max_steps=2", "optim.lr=1", "optim.warmup_epochs=0"]
    said = run_forked("pipeline.train", *run, f"output_dir={straight}", processes=2).stdout
    assert re.search(r"freeze: [\d,]+ of [\d,]+ parameters learn", said)
    shutil.copytree(straight, stopped)
    shutil.rmtree(step_folder(stopped, 2))  # as if the ranks had died before the second checkpoint
    again = run_forked("pipeline.train", *run, f"output_dir={stopped}", processes=2).stdout
    assert "from step 1" in again and same_files(stopped, straight)
    saved = read_weights(straight)
    config = config_from_dict(saved.state.config, source="the checkpoint")
    torch.manual_seed(config.seed)
    model = model_of(config)
    learns = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    manifest = CheckpointManifest.read(step_folder(straight, 2))
    assert {name for kept in manifest.optimizer_state for name in kept.parameters} == learns
    frozen = [name for name in model.state_dict() if name.startswith("stem")]
    assert frozen and not learns & set(frozen) and any("running_mean" in name for name in frozen)
    for weights in (saved.model, saved.ema):
        assert all(torch.equal(weights[name], model.state_dict()[name]) for name in frozen)
        assert not torch.equal(weights["head.weight"], model.head.weight)


def test_names_patterns_and_norms() -> None:
    """Guards against a pattern that freezes more or less than it says, BatchNorm that goes on counting, and others' names."""
    model = create_model("support.their_nets:Net", 5, 16)
    model.freeze(["stem", "blocks.0"])
    learns = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert learns == {f"net.{name}" for name in ("blocks.1.conv.weight", "blocks.1.conv.bias", "blocks.1.norm.weight", "blocks.1.norm.bias", "fc.weight", "fc.bias")}  # fmt: skip
    norms = [module for module in model.train().modules() if isinstance(module, nn.BatchNorm2d)]
    assert [norm.training for norm in norms] == [False, True] and list(model.frozen_norms) == norms[:1]
    config = config_from_dict(
        {"model": {"name": "support.their_nets:Net", "image_size": 16}, "train": {"freeze": "backbone"}}, "t"
    )
    groups = parameter_groups(model_of(config), config.optim)
    assert [group["names"] for group in groups] == [["net.fc.weight"], ["net.fc.bias"]]
    for wrong, sentence in (
        (["stem", "layer9"], "train.freeze must name parameters or modules of the model, got 'layer9': its parameters are net.stem.weight"),
        (["*"], "train.freeze=['*'] leaves no parameter that learns: freeze fewer."),
    ):  # fmt: skip
        with pytest.raises(UserError, match=re.escape(sentence)):
            create_model("support.their_nets:Net", 5, 16).freeze(wrong)
