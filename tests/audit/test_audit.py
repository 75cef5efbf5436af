"""`pervit audit`: an honest run agrees with itself, whatever happened to it, and each forgery is found by name."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import numpy as tensors

from pipeline.audit.records import Records
from pipeline.audit.replay import choose
from pipeline.checkpoint.folder import step_folder
from pipeline.checkpoint.manifest import CheckpointManifest, checksum
from pipeline.config import load_config
from pipeline.runs.files import RunFiles
from support.forging import edit_config, edit_rows, edit_samples, edit_starts
from support.ranks import Job, run_forked, train, wait_for_steps
from support.runs import write_small_config
from support.small_run import SMALL_MODEL

pytestmark = pytest.mark.multiprocess


def audit(run: Path, *words: object, code: int) -> dict:
    """What an audit with this exit code writes down."""
    found, page = run.parent / "audit.json", run.parent / "audit.html"
    result = run_forked("pipeline.audit", run, "--json", found, "--output", page, *words, check=False)
    assert result.returncode == code, result.stdout + result.stderr
    assert "</html>" in page.read_text()
    return json.loads(found.read_text())


def problems(run: Path, *words: object) -> dict[str, list[str]]:
    """What an audit finds, by the part that differs."""
    told = audit(run, *words, code=1)
    assert not told["agrees"]
    found = {part["name"]: part["problems"] for part in told["findings"] if part["problems"]}
    return found | {"trained again": [problem for part in told["replays"] for problem in part["problems"]]}


@pytest.mark.long
def test_a_run_that_was_killed_and_moved_agrees(elastic_run: Path) -> None:
    """On as many processes as each window had, every number comes again bit for bit."""
    told = audit(elastic_run, "--steps", "1,5,8", code=0)
    assert [part["name"] for part in told["findings"]] == ["checkpoints", "config", "code", "data", "metrics", "samples"]
    windows = [(again["window"]["first"], again["window"]["last"], again["window"]["processes"]) for again in told["replays"]]
    assert windows == [(0, 2, 1), (4, 6, 2), (6, 8, 1)]
    for again in told["replays"]:
        assert again["exact"] and again["largest"]["metrics"][0] == again["largest"]["tensors"][0] == 0.0, again
        assert again["compared"]["metrics"] >= 2 * 8 and again["compared"]["tensors"] > 300


def test_on_other_processes_it_agrees_within_bounds(elastic_run: Path) -> None:
    (again,) = audit(elastic_run, "--steps", "5", "--processes", "1", code=0)["replays"]
    assert not again["exact"] and 0 < again["largest"]["metrics"][0] < 1e-4


def test_a_run_of_more_threads_comes_again_with_as_many(digits_shards: Path, tmp_path: Path) -> None:
    """A convolution on two threads adds in another order than on one, which is what this audit would have by itself."""
    config, run = write_small_config(digits_shards, tmp_path), tmp_path / "run"
    larger = ("model.switches.widths=[32,32,32,32]", "model.image_size=64", "train.max_steps=4", "checkpoint.every_steps=2")
    Job(1, "--config", config, f"output_dir={run}", *SMALL_MODEL, *larger, SLURM_CPUS_PER_TASK="2").succeed()
    (start,) = json.loads((run / "environment.json").read_text())
    assert start["cpu_threads"] == min(2, len(os.sched_getaffinity(0))) and re.fullmatch(r".+, \w+", start["cpu"])
    (again,) = audit(run, "--windows", "1", code=0)["replays"]
    assert again["exact"] and not again["unlike"] and again["largest"]["tensors"][0] == 0.0, again


def test_on_another_cpu_it_agrees_within_bounds(elastic_run: Path, tmp_path: Path) -> None:
    """What a start on another machine has trained is a window of its own, and is not called forged for its rounding."""
    run = Path(shutil.copytree(elastic_run, tmp_path / "run"))
    path, config = run / "environment.json", load_config(run / "config.yaml")
    starts = json.loads(path.read_text())
    path.write_text(json.dumps([{**start, "cpu": "another, NEON"} for start in starts]))
    (again,) = audit(run, "--steps", "8", code=0)["replays"]
    assert not again["exact"] and again["unlike"] == ["cpu"]
    assert "bit for bit; within bounds, its cpu being other than the run" in (tmp_path / "audit.html").read_text()
    assert "everything agrees, 1 of 1 window only within bounds" in (tmp_path / "audit.html").read_text()
    shutil.rmtree(step_folder(run, 4))
    for cpu, end in {"another, NEON": 4, starts[-2]["cpu"]: 6}.items():
        path.write_text(json.dumps([*starts[:-1], {**starts[-2], "first_step": 5, "cpu": cpu}, starts[-1]]))
        (window,) = choose(Records(RunFiles(run), config), 1, 500, [3], None)
        assert (window.first, window.last, window.processes) == (2, end, 2)


def test_a_run_that_trains_is_not_audited(elastic_run: Path, digits_shards: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(elastic_run, tmp_path / "run"))
    job = train(1, elastic_run / "config.yaml", run, "train.max_steps=100000")
    assert wait_for_steps(job, run, 1)
    refused = run_forked("pipeline.audit", run, check=False)
    job.signal(signal.SIGKILL)
    assert refused.returncode == 2 and "must be a run that nobody trains, got one that is running at step" in refused.stderr


def change_row(run: Path, key: str, by: float, step: int = 5) -> None:
    """Edit the row of a step, or of its evaluation."""

    def edit(rows: list[dict]) -> None:
        row = next(row for row in rows if row["step"] == step and key in row)
        row[key] += by

    edit_rows(run, edit)


def drop_row(run: Path) -> None:
    edit_rows(run, lambda rows: rows.__delitem__(2))


def change_config(run: Path) -> None:
    edit_config(run, "optim", "weight_decay", 0.04)


def change_version(run: Path) -> None:
    edit_starts(run, lambda starts: starts[1].update(git_commit="0" * 40))


def change_sample(run: Path) -> None:
    def edit(rows: list[dict]) -> None:
        rows[-1]["sample"][0] ^= 1
        rows[-1]["augmentation"][1] = "0" * 16

    edit_samples(run, 0, edit)


def flip_bit(run: Path) -> None:
    path = step_folder(run, 8) / "part-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def forge_weights(run: Path) -> None:
    """Other weights with right checksums, as somebody does who knows how."""
    folder = step_folder(run, 8)
    path, manifest = folder / "part-00000.safetensors", CheckpointManifest.read(folder)
    content = tensors.load_file(path)
    name = next(name for name in content if name.startswith("weight/head"))
    content[name] = np.nextafter(content[name], np.float32(9))
    tensors.save_file(content, path)
    manifest.files[0] = checksum(path)
    (folder / "checkpoint.json").write_text(manifest.to_text())


FORGERIES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "row removed": (drop_row, "metrics", "metrics.jsonl has no row of step 3"),
    "learning rate": (lambda run: change_row(run, "lr", 1e-9), "metrics", "metrics.jsonl: lr of step 5 must be"),
    "config": (change_config, "config", "optim.weight_decay is 0.05 in the checkpoint of step 8, but 0.04 in config.yaml"),
    "code": (change_version, "code", f"git_commit of start 2 is {'0' * 40}, here "),
    "history": (lambda run: (run / "environment.json").write_text("["), "code", "environment.json is damaged"),
    "sample": (change_sample, "samples", "step 8, epoch 0, position"),
    "bit": (flip_bit, "checkpoints", "part-00000.safetensors was changed after it was written"),
    "loss": (lambda run: change_row(run, "loss", 1e-7), "trained again", "loss of step 5 is "),
    "accuracy": (lambda run: change_row(run, "top1", 1e-3, 6), "trained again", "top1 of step 6 (model) is "),
    "weights": (forge_weights, "trained again", "weight of head.weight in step-00000008 differs by"),
}


_TRAINED = ("loss", "accuracy")  # what is found by training steps again, as of "weights"


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long if name in _TRAINED else ()) for name in FORGERIES])
def test_a_forgery_is_found(elastic_run: Path, tmp_path: Path, name: str) -> None:
    forge, where, sentence = FORGERIES[name]
    run = Path(shutil.copytree(elastic_run, tmp_path / "run"))
    forge(run)
    words = ("--steps", "8" if name == "weights" else "5") if where == "trained again" else ("--windows", "0")
    found = problems(run, *words)
    assert any(sentence in problem for problem in found.pop(where)), found
    assert not any(found.values()) or name == "accuracy", found


def test_a_swapped_shard_is_found(elastic_run: Path, copied_shards: Path, tmp_path: Path) -> None:
    """Another file of the same size, in the place of a shard."""
    tar = sorted(copied_shards.glob("train*.tar"))[0]
    content = bytearray(tar.read_bytes())
    content[:] = content[512:] + content[:512]
    tar.write_bytes(content)
    found = problems(elastic_run, "--windows", "0", "--data", copied_shards)
    assert list(found) == ["data", "trained again"] and tar.name in found["data"][0]


def test_what_cannot_be_trained_again_is_no_forgery(run: Path) -> None:
    told = audit(run, "--steps", "5", "--processes", "3", code=2)
    assert not told["agrees"] and not any(part["problems"] for part in told["findings"])
    (again,) = told["replays"]
    assert "train.global_batch_size must be a multiple of 12 for 3 processes" in again["failed"] and not again["problems"]
    page = (run.parent / "audit.html").read_text()
    assert "what was compared agrees, 1 of 1 window not trained again" in page and "not trained again: train.global" in page


def test_a_run_in_a_bucket(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of all its checkpoints are fetched, not only those of the newest."""
    pytest.importorskip("obstore", reason="needs the extra `remote`")
    from pipeline.checkpoint.bucket import RunStore
    from pipeline.stores.place import RemotePath
    from support.stores import BUCKET, aws_environment, s3_server, upload

    with s3_server(monkeypatch) as port:
        url = f"s3://{BUCKET}/{tmp_path.name}"
        upload(run, tmp_path.name)
        upload(run / "samples", f"{tmp_path.name}/samples")
        RunStore(RemotePath(url)).bring_together(run, "environment.json")
        outputs = ("--output", tmp_path / "audit.html", "--json", tmp_path / "audit.json")
        variables = {**aws_environment(port), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        told = run_forked("pipeline.audit", url, "--windows", "0", *outputs, **variables)
        assert "everything agrees" in told.stdout and json.loads((tmp_path / "audit.json").read_text())["agrees"]
