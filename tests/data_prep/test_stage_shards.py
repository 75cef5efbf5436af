"""A cache that is filled before a training, by several commands, with interruptions."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.files import file_sha256
from pipeline.shards.manifest import ShardManifest
from support.cached_stream import result_of, start_stream
from support.launching import REPOSITORY, clean_environment, run_script
from support.ranks import run_forked


def counts(output: str, split: str) -> dict[str, int]:
    """What a command says of a split: words -> number."""
    line = next(line for line in output.splitlines() if f" of {split}, " in line)
    return {
        words.strip(): int(number) for number, words in re.findall(r"(\d+) (fetched[a-z ]*|already there|without room)", line)
    }


def check_whole(shards: Path, cache: Path) -> None:
    """Both splits, each shard as in the manifest, and nothing else."""
    expected = {
        shard.file.removesuffix(".tar"): shard.sha256
        for split in ShardManifest.read(shards).splits.values()
        for shard in split.shards
    }
    assert {path.name.rpartition("-")[0]: file_sha256(path) for path in cache.iterdir()} == expected


def test_commands_share_the_work_and_a_training_needs_no_source(digits_shards: Path, tmp_path: Path) -> None:
    """Guards against a prolog that fetches everything once for each job of a node, or every time."""
    cache = tmp_path / "cache"
    command = [sys.executable, "data_prep/stage_shards.py", str(digits_shards), "--cache", str(cache), "--workers", "2"]
    both = [
        subprocess.Popen(command, cwd=REPOSITORY, env=clean_environment(), stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    said = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    for split, shards in (("train", 4), ("val", 1)):
        each = [counts(output, split) for output in said]
        assert sum(one["fetched"] for one in each) == shards and [sum(one.values()) for one in each] == [shards, shards]
    check_whole(digits_shards, cache)

    again = run_script(command[1], *command[2:]).stdout
    assert counts(again, "train") == {"fetched": 0, "already there": 4}
    assert result_of(start_stream(digits_shards, cache, "--offline"))["found"] == 4


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_command_goes_on(how: signal.Signals, digits_shards: Path, tmp_path: Path) -> None:
    """Guards against a prolog's time limit that leaves a cache which nobody can use."""
    cache = tmp_path / "cache"
    slow = (
        "import time, pipeline.shards.files.cache_filler as fetch; fetch.CHUNK = 1 << 16; append = fetch.Partial.append\n"
        "fetch.Partial.append = lambda self, data: (append(self, data), time.sleep(0.05))\n"
        "from data_prep.stage_shards import main, run_command; run_command(main)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", slow, str(digits_shards), "--cache", str(cache)],
        env=clean_environment(PYTHONPATH=str(REPOSITORY)),
        stderr=subprocess.PIPE,
        text=True,
    )
    while not any(path.stat().st_size for path in cache.glob(".*.partial")):
        time.sleep(0.01)
    process.send_signal(how)
    _, err = process.communicate()
    if how == signal.SIGTERM:
        assert (process.returncode, err.strip()) == (
            130,
            "stopped; the same command continues from what was saved, if anything was",
        )
    run_forked("data_prep.stage_shards", digits_shards, "--cache", cache)
    check_whole(digits_shards, cache)


def test_what_does_not_fit_is_said_and_no_error(digits_shards: Path, tmp_path: Path) -> None:
    """Guards against a prolog that takes a node out of service since its disk is small."""
    sizes = [shard.bytes for shard in ShardManifest.read(digits_shards).splits["train"].shards]
    gib = (sizes[0] + sizes[1] + 1000) / (1 << 30)
    said = run_forked("data_prep.stage_shards", digits_shards, "--cache", tmp_path / "cache", "--gib", gib).stdout
    assert counts(said, "train") == {"fetched": 2, "without room": 2}
    assert f"; training reads the others from {digits_shards}" in said
    assert counts(said, "val")["fetched"] + counts(said, "val").get("without room", 0) == 1
    assert len(list((tmp_path / "cache").glob("train-*"))) == 2  # val has not taken their place


def test_a_damaged_source_is_named(copied_shards: Path, tmp_path: Path) -> None:
    """Guards against damage that is found in the middle of the training."""
    with open(copied_shards / "val-000000.tar", "r+b") as tar:
        tar.seek(600)
        tar.write(b"wrong")
    result = run_forked("data_prep.stage_shards", copied_shards, "--cache", tmp_path / "cache", check=False)
    assert result.returncode == 1
    assert (
        "0 fetched, 1 could not be fetched (val-000000.tar: sample 0 of it was changed after it was written: its checksum must be "
        in result.stdout
    )
    assert len(list((tmp_path / "cache").iterdir())) == 4


def test_wrong_arguments_are_one_sentence(digits_shards: Path, tmp_path: Path) -> None:
    """Guards against a traceback in the log of a prolog."""
    (tmp_path / "file").touch()
    for arguments, sentence in (
        (
            ("--cache", tmp_path / "absent" / "cache"),
            f"cannot be filled ({tmp_path / 'absent'} does not exist): check the folder",
        ),
        (("--cache", tmp_path / "file"), "cannot be filled (it is not a directory): check the folder"),
        (
            ("--cache", digits_shards),
            f"--cache must not be the folder of the shards themselves, got {digits_shards}: choose a folder",
        ),
        (("--cache", tmp_path, "--gib", 0), "--gib must be above 0 and at most 1048576, got 0"),
        (("--cache", ""), "--cache must be a folder on a disk of this node, got an empty name"),
        (("--cache", tmp_path, "--workers", 0), "--workers must be 1 to 256, got 0"),
    ):
        result = run_forked("data_prep.stage_shards", digits_shards, *arguments, check=False)
        assert result.returncode == 2 and result.stderr.count("\n") == 1 and sentence in result.stderr, result.stderr
    assert os.listdir(tmp_path) == ["file"]
