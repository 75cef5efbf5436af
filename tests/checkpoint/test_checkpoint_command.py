"""``pervit checkpoint``: what is there and is it whole; and ``pervit export``, whose weights everything else takes."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import pipeline.export
from pipeline.checkpoint import __main__
from pipeline.checkpoint.folder import step_folder
from pipeline.checkpoint.manifest import CheckpointManifest
from pipeline.checkpoint.parts import write_part
from pipeline.checkpoint.weights import SavedWeights, read_initial_weights, read_weights
from pipeline.errors import UserError
from pipeline.inference.trained import read_trained
from pipeline.models import create_model
from pipeline.models.weights.exported import read_exported
from support.ranks import run_forked

pytestmark = pytest.mark.multiprocess
SWITCHES = {"widths": [32, 48, 64, 80], "phi_p_frozen": True}


@pytest.fixture(scope="module")
def run(digits_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of two processes under ZeRO-3 with checkpoints of steps 2, 3 and 4."""
    folder = tmp_path_factory.mktemp("command")
    config = {
        "output_dir": str(folder / "run"),
        "model": {"name": "pervit_t", "image_size": 32, "num_classes": 10, "switches": SWITCHES},
        "data": {"path": str(digits_shards), "num_threads": 1, "mean": [0.5, 0.5, 0.5]},
        "train": {"epochs": 10, "max_steps": 4, "global_batch_size": 8, "micro_batch_size": 4, "precision": "fp32"},
        "eval": {"every_epochs": None},
        "checkpoint": {"every_steps": 1, "keep_every_steps": 2},
    }
    config["train"] |= {"zero_stage": 3, "ema_decay": 0.5}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    run_forked("pipeline.train", "--config", folder / "config.yaml", processes=2)
    return folder / "run"


@pytest.fixture(scope="module")
def saved(run: Path) -> SavedWeights:
    return read_weights(run)


@pytest.fixture
def export(monkeypatch: pytest.MonkeyPatch):
    """``pervit export`` within this process."""

    def call(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["pipeline.export", *map(str, arguments)])
        return pipeline.export.main()

    return call


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch):
    """The command within this process."""

    def call(*arguments: object) -> int | None:
        monkeypatch.setattr(sys, "argv", ["pipeline.checkpoint", *map(str, arguments)])
        return __main__.main()

    return call


@pytest.fixture
def damaged(run: Path, tmp_path: Path) -> Path:
    """A copy of the run with a flipped bit in step 4 and a manifest cut short in step 3."""
    copy = Path(shutil.copytree(run, tmp_path / "damaged"))
    part = step_folder(copy, 4) / "part-00001.safetensors"
    data = bytearray(part.read_bytes())
    data[-100] ^= 4
    part.write_bytes(data)
    manifest = step_folder(copy, 3) / "checkpoint.json"
    manifest.write_text(manifest.read_text()[:-200])
    return copy


def test_inspect_shows_every_checkpoint_and_the_state_of_one(run: Path, saved: SavedWeights, command, capsys) -> None:
    """Guards against a table that does not say which checkpoint is which, and why it is still there."""
    command("inspect", run)
    rows, state = capsys.readouterr().out.split("\n\n")
    header, *lines = rows.splitlines()
    assert [line.split()[0] for line in lines] == ["2", "3", "4"] and header.split()[0] == "step"
    assert lines[0].endswith("multiple of 2") and "one of the last 2" not in lines[0]
    assert lines[1].endswith("  one of the last 2") and "best (" in lines[2] and "multiple of 2" in lines[2]
    values = {line[:14].strip(): line[14:] for line in state.splitlines()}
    assert values["model"] == f"pervit_t, 10 classes, 32 pixels, phi_p_frozen=True, widths={SWITCHES['widths']}"
    parameters = sum(p.numel() for p in create_model("pervit_t", 10, 32, switches=SWITCHES).parameters())
    assert values["parameters"].startswith(f"{parameters:,} in ")
    assert values["processes"] == "2, ZeRO 3" and values["samples seen"] == "32" and values["bad samples"] == "0"
    assert values["config"] == saved.state.config_hash[:12] and saved.state.data["fingerprint"][:12] in values["data set"]
    assert "part-00000.safetensors" in values["files"] and "part-00001.safetensors" in state
    command("inspect", run, "--step", 2)
    assert "not evaluated yet" in capsys.readouterr().out


def test_verify_reads_every_file(run: Path, command, capsys) -> None:
    """Guards against a check that passes because it looks at little."""
    assert command("verify", run) == 0
    out = capsys.readouterr().out
    assert out.count("intact  part-") == 6 and out.splitlines()[-1] == "intact"
    assert command("verify", run, "--step", 3) == 0
    assert capsys.readouterr().out.count("intact  part-") == 2


def test_a_checkpoint_is_also_meant_by_its_path_or_as_the_best(run: Path, command, capsys) -> None:
    """Guards against a path that ``inspect`` prints and refuses, and against all checkpoints read where one was meant."""
    assert command("verify", step_folder(run, 3)) == 0
    assert capsys.readouterr().out.count("intact  part-") == 2
    command("inspect", step_folder(run, 2))
    assert f"checkpoint    {step_folder(run, 2)}\n" in capsys.readouterr().out
    command("inspect", run, "--step", "best")
    assert f"checkpoint    {step_folder(run, 4)}\n" in capsys.readouterr().out
    for arguments, expected in (
        (("inspect", run, "--step", "bset"), "'bset' is not a step"),
        (("verify", "--help"), "examples:\n  python"),
    ):
        with pytest.raises(SystemExit):
            command(*arguments)
        output = capsys.readouterr()
        assert expected in output.out + output.err


def test_verify_names_what_is_damaged(damaged: Path) -> None:
    """Guards against damage that is found but not named, or named with exit code 0."""
    result = run_forked("pipeline.checkpoint", "verify", damaged, check=False)
    assert result.returncode == 1 and not result.stderr, result.stderr
    lines = [line for line in result.stdout.splitlines() if "DAMAGED" in line]
    assert len(lines) == 2 and "step-00000003/checkpoint.json is damaged" in lines[0]
    assert "step-00000004/part-00001.safetensors was changed after it was written" in lines[1]
    last = result.stdout.splitlines()[-1]
    assert last == f"damaged: {step_folder(damaged, 3)}, {step_folder(damaged, 4)}"
    assert run_forked("pipeline.checkpoint", "verify", damaged, "--step", 2).returncode == 0


def test_verify_notices_a_part_that_was_never_listed(run: Path, command, tmp_path: Path, capsys) -> None:
    """Guards against a checkpoint that looks whole because its list forgets what one process saved."""
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    folder = step_folder(copy, 4)
    manifest = CheckpointManifest.read(folder)
    (folder / "checkpoint.json").write_text(replace(manifest, files=manifest.files[:1]).to_text())
    assert command("verify", copy) == 1
    assert "must end at" in capsys.readouterr().out


def test_inspect_of_a_damaged_run_shows_the_rest(damaged: Path, command, capsys) -> None:
    """Guards against a tool that fails on just the folder for which one needs it."""
    (damaged / "checkpoints" / ".saving-00000005").mkdir()
    command("inspect", damaged)
    out = capsys.readouterr().out
    assert (
        "3  " in out and "checkpoint.json is damaged" in out and "step-00000004" in out and ".saving-00000005 is being" in out
    )
    with pytest.raises(UserError, match="checkpoint.json is damaged"):
        command("inspect", damaged, "--step", 3)


@pytest.mark.parametrize("kind", ["model", "ema"])
@pytest.mark.parametrize("names", ["ours", "authors"])
def test_an_exported_file_is_the_model(kind: str, names: str, run: Path, saved: SavedWeights, export, tmp_path: Path) -> None:
    """Guards against exported weights that are the other ones, or that nothing takes."""
    file = tmp_path / "weights.safetensors"
    export(run, "--output", file, "--weights", kind, "--names", names)
    expected, model = saved.choose(kind), read_exported(file)[0]
    assert not model.training and model.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    plain = read_initial_weights(file).weights  # what train.init_from takes
    assert (plain.keys() == expected.keys()) == (names == "ours")
    if names == "ours":
        create_model("pervit_t", num_classes=10, image_size=32, switches=SWITCHES).load_state_dict(plain)


def test_an_exported_file_evaluates_as_its_checkpoint(run: Path, digits_shards: Path, export, tmp_path: Path) -> None:
    """Guards against a file that lacks what its weights were trained with: these images are normalized in another way."""
    file, results = tmp_path / "weights.safetensors", []
    export(run, "--output", file, "--weights", "ema")
    for source, options in ((run, ["--weights", "ema"]), (file, [])):
        arguments = ("--checkpoint", source, "--data", digits_shards, *options, "--json", tmp_path / "result.json")
        run_forked("pipeline.evaluate", *arguments)
        results.append(json.loads((tmp_path / "result.json").read_text()))
    first, second = results
    assert first.pop("checkpoint") != second.pop("checkpoint") and first == second
    for step, kind, expected in ((None, "model", "has --weights ema, not model"), (3, None, "has --step 4, not 3")):
        with pytest.raises(UserError, match=expected):
            read_trained(file, step, kind)


def test_nothing_is_replaced_silently(run: Path, export, tmp_path: Path) -> None:
    """Guards against the loss of an earlier export."""
    file = tmp_path / "weights.safetensors"
    file.write_text("mine")
    with pytest.raises(UserError, match="exists: choose another --output, or add --force"):
        export(run, "--output", file)
    assert file.read_text() == "mine"
    export(run, "--output", file, "--step", 2, "--force")
    read_exported(file)
    assert sorted(path.name for path in tmp_path.iterdir()) == [file.name, f"{file.name}.md", f"{file.name}.sha256"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["{tmp}", "--output", "{tmp}/a.safetensors"], "must have a checkpoint, got no "),
        (["{run}", "--output", "{tmp}/x/a.safetensors"], r"the folder .*/x does not exist or cannot be written"),
        (["{damaged}", "--output", "{tmp}/a.safetensors"], "part-00001.safetensors was changed after it was written"),
        (["{damaged}", "--output", "{tmp}/a.safetensors", "--step", "3"], "checkpoint.json is damaged"),
    ],
)
def test_nothing_is_exported_of_what_is_not_whole(
    arguments: list[str], expected: str, run: Path, damaged: Path, export, tmp_path: Path
) -> None:
    """Guards against a traceback, and against half an exported file."""
    refuses(export, arguments, expected, run=run, damaged=damaged, tmp=tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["inspect", "{tmp}/nowhere"], "nowhere must have a checkpoint, got no "),
        (["verify", "{tmp}"], "must have a checkpoint, got no "),
        (["inspect", "{run}", "--step", "7"], r"no checkpoint of step 7, but of \[2, 3, 4\]: choose one of them"),
        (["verify", "{run}", "--step", "-1"], r"no checkpoint of step -1, but of \[2, 3, 4\]"),
    ],
)
def test_each_mistake_is_one_sentence(arguments: list[str], expected: str, run: Path, command, tmp_path: Path) -> None:
    """Guards against a traceback."""
    refuses(command, arguments, expected, run=run, tmp=tmp_path)


def test_a_run_without_an_average_has_none_to_export(run: Path, command, export, tmp_path: Path) -> None:
    """Guards against plain weights under the name of averaged ones."""
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    drop_averages(copy)
    with pytest.raises(UserError, match="has no ema weights: choose the model's"):
        export(copy, "--output", tmp_path / "a.safetensors", "--weights", "ema")
    assert command("verify", copy, "--step", 4) == 0


def refuses(command: Callable, arguments: list[str], expected: str, **places: Path) -> None:
    """Assert that a command answers arguments, with the names of ``places`` in them, by one sentence."""
    with pytest.raises(UserError, match=expected) as error:
        command(*(argument.format(**places) for argument in arguments))
    assert "\n" not in str(error.value)


def drop_averages(run: Path) -> None:
    """Write the newest checkpoint again as a run without ``train.ema_decay`` would have written it."""
    folder = step_folder(run, 4)
    manifest, records = CheckpointManifest.read(folder), []
    for record in manifest.files:
        tensors = {key: value for key, value in load_file(folder / record.name).items() if not key.startswith("ema")}
        (folder / record.name).unlink()
        records.append(write_part(folder / record.name, tensors))
    (folder / "checkpoint.json").write_text(replace(manifest, files=records).to_text())
