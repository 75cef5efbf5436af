"""Each mistake a user makes is one sentence on stderr that names key or file, what was found, what is needed and the remedy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from support.launching import run_module
from support.ranks import run_forked


@pytest.fixture(scope="module")
def damaged(digits_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Shard sets with one thing wrong each."""
    folder = tmp_path_factory.mktemp("damaged")
    sets = {name: Path(shutil.copytree(digits_shards, folder / name)) for name in ("no_index", "truncated")}
    (sets["no_index"] / "train-000002.idx").unlink()
    tar = sets["truncated"] / "train-000002.tar"
    tar.write_bytes(tar.read_bytes()[:-5000])
    return {**sets, "nowhere": folder / "nowhere"}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.epoch=1", ["unknown key 'train.epoch'", "did you mean 'train.epochs'?"]),
        ("train.epochs=many", ["train.epochs must be a number, got 'many'"]),
        (
            "train.global_batch_size=18",
            [
                "train.global_batch_size must be a multiple of",
                "4 x 1 process = 4, got 18",
                "to a multiple of 4 (augment.mix_group 4 x 1 processes)",
            ],
        ),
        ("data.path={nowhere}", ["nowhere does not exist", "set data.path"]),
        ("data.path={no_index}", ["train-000002.idx is missing", "wds2idx"]),
        ("data.path={truncated}", ["train-000002.tar must have", "by manifest.json, got", "shard again"]),
        ("model.num_classes=1000", ["model.num_classes is 1000", "has 10 classes", "set model.num_classes=10"]),
        ("model.image_size=100", ["model.image_size must be a multiple of 16 and at least 32, got 100", "set it to 96"]),
        ("model.switches.conv_stm=false", ["model.switches: unknown switch 'conv_stm'", "did you mean 'conv_stem'?"]),
        ("model.name=pervit_x", ["model.name must be", "pervit_m, pervit_s, pervit_t, posmlp", "got 'pervit_x': did you mean"]),
        ("output_dir=/proc/nothing", ["output_dir /proc/nothing must be a writable folder", "choose another output_dir"]),
    ],
)
def test_training_says_what_is_wrong(override: str, expected: list[str], small_run: Path, damaged: dict[str, Path]) -> None:
    """Guards against a traceback from three libraries down, and against a run that is said to begin, or a folder made, for nothing."""
    result = run_forked("pipeline.train", "--config", small_run, override.format(**damaged), check=False)
    assert result.returncode == 2
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    for part in expected:
        assert part in lines[0]
    assert "a new run" not in result.stdout and not (small_run.parent / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--checkpoint", "{nowhere}", "--data", "{truncated}"], "nowhere does not exist"),
        (["--checkpoint", "{nowhere}", "--data", "{truncated}", "--json", "{nowhere}/x.json"], "nowhere does not exist"),
    ],
)
def test_evaluation_says_what_is_wrong(arguments: list[str], expected: str, damaged: dict[str, Path]) -> None:
    """Guards against a traceback when a run folder is mistyped."""
    result = run_forked("pipeline.evaluate", *(a.format(**damaged) for a in arguments), check=False)
    assert result.returncode == 2 and expected in result.stderr and "Traceback" not in result.stderr


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.epoch=1", "error: override 'train.epoch=1': unknown key 'train.epoch'"),
        ("train.global_batch_size=8", "= 12, got 8 (8 / 12 = 0.6667 accumulation steps"),
    ],
)
def test_what_all_ranks_find_wrong_is_said_once(override: str, expected: str, small_run: Path) -> None:
    """Guards against a launcher that shows the same sentence twice, once for the rank that ended first."""
    result = run_module("pipeline.train", "--config", small_run, override, processes=3, check=False)
    assert result.returncode == 2
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and expected in lines[0], result.stderr


def test_several_processes_without_a_meeting_point(small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against DeepSpeed's "No module named mpi4py" when a variable is missing."""
    from support import launching

    plain = launching.clean_environment
    monkeypatch.setattr(launching, "clean_environment", lambda: plain(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0"))
    result = run_module("pipeline.train", "--config", small_run, check=False)
    assert result.returncode == 2 and "MASTER_ADDR must be set for 2 processes" in result.stderr
    monkeypatch.setattr(launching, "clean_environment", lambda: plain(RANK="3", WORLD_SIZE="two", LOCAL_RANK="0"))
    result = run_module("pipeline.train", "--config", small_run, check=False)
    assert result.returncode == 2 and "WORLD_SIZE must be a whole number from" in result.stderr
