"""Checkpoint files that were damaged after they were written: named, passed over, kept as evidence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from faults.history import same_files
from pipeline.checkpoint.folder import saved_steps, step_folder
from support.ranks import train
from support.runs import write_small_config

pytestmark = pytest.mark.multiprocess

STEPS = 6
OPTIONS = (f"train.max_steps={STEPS}", "checkpoint.every_steps=1", f"checkpoint.keep_last={STEPS}")
MANIFEST = "checkpoint.json"


@pytest.fixture(scope="module")
def whole(digits_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes with a checkpoint of every step; its config lies beside it."""
    config = write_small_config(digits_shards, tmp_path_factory.mktemp("damage"))
    train(2, config, config.parent / "whole", *OPTIONS).succeed()
    return config.parent / "whole"


def truncate(path: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 1)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {  # step -> file, what happens to it, what the warning says of it
    6: ("part-00001.safetensors", truncate, "were written"),
    5: ("part-00000.safetensors", flip_a_bit, "its checksum does not match"),
    4: ("part-00001.safetensors", Path.unlink, "is missing"),
    3: (MANIFEST, flip_a_bit, "is damaged, its checksum does not match"),
    2: (MANIFEST, Path.unlink, "is missing"),
}


def test_each_kind_of_damage_is_named_and_the_one_before_is_taken(whole: Path, tmp_path: Path) -> None:
    """Guards against weights read from a damaged file, a run that cannot start because its newest checkpoint is damaged, and
    evidence overwritten when the run comes to the same step again."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for step, (name, damage, _) in DAMAGE.items():
        damage(step_folder(run, step) / name)
    job = train(2, whole.parent / "config.yaml", run, *OPTIONS).succeed()
    warnings = [line for line in job.stderr().splitlines() if line.startswith("warning:")]
    assert len(warnings) == len(DAMAGE) and "Traceback" not in job.stderr()
    for warning, (step, (name, _, saying)) in zip(warnings, DAMAGE.items()):
        assert str(step_folder(run, step) / name) in warning and saying in warning
    assert "steps 1 to 6" in job.stdout()
    assert saved_steps(run) == list(range(1, STEPS + 1))
    assert same_files(run, whole)
    kept = sorted(path.name for path in (run / "checkpoints").glob("damaged-*"))
    assert kept == [f"damaged-step-{step:08d}.1" for step in sorted(DAMAGE)]


def test_folders_under_other_names_are_passed_over(whole: Path, tmp_path: Path) -> None:
    """Guards against a run that goes on with the weights of another step because two folders were exchanged, and against a traceback,
    which the job script takes for a crash, because one was renamed."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for old, new in ((4, 40), (5, 4), (40, 5), (6, 7)):
        step_folder(run, old).rename(step_folder(run, new))
    job = train(2, whole.parent / "config.yaml", run, *OPTIONS).succeed()
    warnings = [line for line in job.stderr().splitlines() if line.startswith("warning:")]
    for warning, (folder, written) in zip(warnings, ((7, 6), (5, 4), (4, 5))):
        assert f"{step_folder(run, folder) / MANIFEST} is of step {written}" in warning, warning
    assert len(warnings) == 3 and "steps 3 to 6" in job.stdout() and "Traceback" not in job.stderr()
    assert same_files(run, whole)
    assert len(list((run / "checkpoints").glob("damaged-*"))) == 3


def test_a_kill_between_two_renames_loses_nothing(whole: Path, tmp_path: Path) -> None:
    """Guards against a checkpoint that is gone because the run was killed while it replaced it by another one of the same step, as
    it does after an evaluation that was made up for; and against leftovers that pile up."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    step_folder(run, STEPS).rename(run / "checkpoints" / f".replaced-{STEPS:08d}")
    (run / "checkpoints" / f".saving-{STEPS:08d}").mkdir()
    job = train(1, whole.parent / "config.yaml", run, *OPTIONS).succeed()
    assert "is complete at step 6" in job.stdout()
    assert same_files(run, whole) and not list((run / "checkpoints").glob(".*"))


def test_nothing_whole_is_one_sentence(whole: Path, tmp_path: Path) -> None:
    """Guards against a run that silently begins anew over damaged checkpoints, and against a traceback."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for step in saved_steps(run):
        truncate(step_folder(run, step) / "part-00000.safetensors")
    before = sorted(path for path in run.rglob("*"))
    job = train(1, whole.parent / "config.yaml", run, *OPTIONS)
    assert job.wait() == [2]
    *_, sentence = job.stderr().splitlines()
    assert sentence.startswith(f"error: {step_folder(run, STEPS) / 'part-00000.safetensors'} has ")
    assert "none of the 6 checkpoints" in sentence and "restore the files, or choose another output_dir" in sentence
    assert "Traceback" not in job.stderr()
    assert sorted(path for path in run.rglob("*")) == before


@pytest.mark.parametrize(
    ("edited", "expected"),
    [
        (lambda content: content.update(format=4), "must have format 1, got 4: use the version of the pipeline that wrote it"),
        (lambda content: content["state"].update(samples=3), "state.samples must be 96, those of 6 steps, got 3: take another"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_not_passed_over(
    edited: Callable, expected: str, whole: Path, tmp_path: Path
) -> None:
    """Guards against steps of training thrown away because an older version of the pipeline takes a newer one's checkpoint for a
    damaged one, sets it aside and goes on from before, and against counts that are wrong from there on."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    newest = step_folder(run, STEPS) / MANIFEST
    content = json.loads(newest.read_text())["content"]
    edited(content)
    checksum = xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())
    newest.write_text(json.dumps({"xxh3": checksum, "content": content}))
    job = train(1, whole.parent / "config.yaml", run, *OPTIONS)
    assert job.wait() == [2]
    *_, sentence = job.stderr().splitlines()
    assert sentence.startswith(f"error: {newest}") and expected in sentence
    assert "Traceback" not in job.stderr() and saved_steps(run) == list(range(1, STEPS + 1))
