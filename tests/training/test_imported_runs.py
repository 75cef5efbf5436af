"""Runs of somebody else's model, from a file in another folder: killed on two processes, on bit for bit, then used and exported."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from faults.history import same_files
from pipeline.checkpoint.folder import latest_step, saved_steps
from pipeline.checkpoint.weights import read_weights
from pipeline.inference.trained import read_trained
from pipeline.models import registry
from pipeline.models.weights.exported import read_exported
from support import their_augs, their_nets
from support.ranks import Job, run_forked
from support.runs import step_rows

pytestmark = pytest.mark.multiprocess
NAME = "nets_of_a_user:Net"
KEYS = [f"model.name={NAME}", "model.options={width: 8, dropout: 0.2}", "model.switches={}", "model.drop_path=0.3"]
KEYS += ["augment.imported={augs_of_a_user:Posterize: {least: 2}}", "augment.rand_augment_ops=0"]
KEYS += [
    "train.zero_stage=0",
    "train.freeze=[stem, blocks.0]",
    "train.ema_decay=0.9",
    "log.every_steps=1",
    "checkpoint.every_steps=1",
]


def test_a_killed_run_goes_on_and_is_used_and_exported(
    small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against draws of the network's own that a restart repeats otherwise, and commands that know no such model."""
    code, straight, killed = tmp_path / "code", tmp_path / "straight", tmp_path / "killed"
    code.mkdir()
    shutil.copy(str(their_nets.__file__), code / "nets_of_a_user.py")
    shutil.copy(str(their_augs.__file__), code / "augs_of_a_user.py")
    run = ["--config", small_run, *KEYS]
    job = Job(2, *run, f"output_dir={killed}", "train.max_steps=400", folder=code)
    assert job.until(lambda: (latest_step(killed) or 0) >= 2), job.outputs()
    job.kill()
    job.wait()
    last = f"train.max_steps={(latest_step(killed) or 0) + 2}"
    again = run_forked("pipeline.train", *run, f"output_dir={killed}", last, processes=2, folder=code).stdout
    assert "resuming" in again and f"{NAME}: 2 branches of stochastic depth from the stream" in again
    run_forked("pipeline.train", *run, f"output_dir={straight}", last, processes=2, folder=code)
    losses = [[(row["step"], row["loss"], row["grad_norm"]) for row in step_rows(folder)] for folder in (killed, straight)]
    assert same_files(killed, straight) and losses[0] == losses[1]

    weights = [read_weights(straight, step).model for step in saved_steps(straight)[-2:]]
    same = {name for name, value in weights[0].items() if torch.equal(value, weights[1][name])}
    assert same == {name for name in weights[0] if name.startswith(("net.stem.", "net.blocks.0."))}

    monkeypatch.setenv(registry.TRUSTED, NAME)
    monkeypatch.syspath_prepend(str(code))
    trained, images = read_trained(straight), torch.randn(2, 3, 32, 32)
    scores = trained.build_model()(images)
    data = Path(trained.config.data.path)
    trusted = {"folder": code, registry.TRUSTED: NAME}
    run_forked("pipeline.predict", straight, data / "val-000000.tar", "--output", tmp_path / "out.csv", **trusted)
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 1 + 359
    for form, file in (("safetensors", "net.safetensors"), ("torch-export", "net.pt2")):
        run_forked("pipeline.export", straight, "--format", form, "--output", tmp_path / file, **trusted)
    assert torch.equal(read_exported(tmp_path / "net.safetensors")[0](images), scores)
    graph = torch.export.load(tmp_path / "net.pt2").module()
    torch.testing.assert_close(graph(images), scores, rtol=1e-4, atol=1e-4)
    refused = run_forked("pipeline.evaluate", "--checkpoint", straight, "--data", data, folder=code, check=False)
    assert (
        f"{straight} is of the model {NAME}, whose code would run: set {registry.TRUSTED}={NAME} if you trust it."
        in refused.stderr
    )
