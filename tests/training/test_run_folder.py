"""A run folder is continued by its own run alone: what differs is named, and what is meant can be accepted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeline.cluster.world import World
from pipeline.config import Config, config_from_dict
from pipeline.errors import UserError
from pipeline.logs import console
from pipeline.shards.shard_set import ShardSet
from pipeline.training.folder import check_same_data, check_same_run, config_hash
from support.launching import PATIENCE, REPOSITORY, clean_environment
from support.ranks import run_forked

ALONE = World(0, 1, torch.device("cpu"), 1)
SECOND = World(1, 2, torch.device("cpu"), 1)

# Two processes of one run that open a folder which is free, then one which another process holds.
PAIR = """
import sys
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from pipeline.cluster.world import World
from pipeline.command_line import run_command
from pipeline.training.folder import open_run_folder
folder, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2, timeout=timedelta(seconds=60))
world = World(rank, 2, torch.device("cpu"), 1)
def main():
    lock = open_run_folder(Path(folder) / "free", world)
    assert (lock is None) == (rank == 1)
    print("opened", flush=True)
    open_run_folder(Path(folder) / "held", world)
    print("both", flush=True)
run_command(main)
"""


def changed(**sections: dict) -> Config:
    """The default config with other values."""
    return config_from_dict({"output_dir": "runs/x", **sections}, "a test")


def refusal(now: Config, before: Config) -> str:
    with pytest.raises(UserError) as error:
        check_same_run(now, before, ALONE)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_changed_key_is_refused_with_the_override_that_accepts_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a resumed run that silently trains on with another learning rate, and against no way to do so on purpose."""
    console.install()
    before, now = changed(), changed(optim={"lr": 1.0})
    assert refusal(now, before) == (
        "runs/x was started with optim.lr=0.0005, got 1.0: set it back, choose another output_dir, or accept the change with "
        "checkpoint.accept=[optim.lr]."
    )
    check_same_run(now, None, ALONE)  # nothing to continue: a corrected start
    assert capsys.readouterr().out == ""
    for accept in (["optim.lr"], ["optim"]):
        accepting = changed(optim={"lr": 1.0}, checkpoint={"accept": accept})
        check_same_run(accepting, before, SECOND)
        assert capsys.readouterr().out == ""
        check_same_run(accepting, before, ALONE)
        said = capsys.readouterr().out
        assert said.endswith(" note: this run changes optim.lr from 0.0005 to 1.0, which checkpoint.accept allows.\n")
        assert said.count("\n") == 1


def test_all_changed_keys_are_named_and_many_are_counted() -> None:
    """Guards against one refusal after the other for a config with several changes, and against a screen full of keys."""
    before = changed()
    two = refusal(changed(optim={"lr": 1.0, "eps": 1e-6}, checkpoint={"accept": ["data.flip"]}), before)
    assert "started with optim.lr=0.0005, got 1.0; with optim.eps=1e-08, got 1e-06: set them back" in two
    assert two.endswith("or accept the changes with checkpoint.accept=[optim.lr,optim.eps].")
    many = {
        "lr": 1.0,
        "eps": 1e-6,
        "min_lr": 0.0,
        "warmup_lr": 0.0,
        "warmup_epochs": 1,
        "weight_decay": 0.1,
        "lr_batch_size": 1,
    }
    sentence = refusal(changed(optim=many), before)
    assert sentence.count(", got ") == 5 and "; and 2 more keys differ: set them back" in sentence
    rest = refusal(changed(optim=many, checkpoint={"accept": ["optim.lr", "optim.eps", "optim.min_lr"]}), before)
    assert "optim.lr=" not in rest and rest.count(", got ") == 4


def test_what_changes_shapes_cannot_be_accepted() -> None:
    """Guards against a checkpoint that is forced into a model it does not fit."""
    before = changed()
    for accept in (["model"], ["model.num_classes"]):
        sentence = refusal(changed(model={"num_classes": 10}, checkpoint={"accept": accept}), before)
        assert "started with model.num_classes=1000, got 10: set it back, or choose another output_dir" in sentence
        assert "no run can continue with another model.num_classes, so that cannot be accepted" in sentence
    sentence = refusal(changed(train={"global_batch_size": 2048}, checkpoint={"accept": ["train"]}), before)
    assert "no run can continue with another train.global_batch_size" in sentence  # its place in the stream would jump
    check_same_run(changed(model={"drop_path": 0.1}, checkpoint={"accept": ["model"]}), before, ALONE)


def test_keys_that_change_no_weight_are_free_and_outside_the_hash() -> None:
    """Guards against a run that cannot move to other hardware, and against a hash that calls that another run."""
    before = changed()
    free = changed(
        train={
            "zero_stage": 3,
            "micro_batch_size": 16,
            "max_skipped_steps": 2,
            "max_steps": 5,
            "activation_checkpointing": True,
        },
        distributed={"silence_timeout": 10},
        checkpoint={"every_steps": 3, "keep_last": 9},
        log={"samples": True},
        eval={"batch_size": 3},
        data={"path": "elsewhere", "num_threads": 2},
    )
    check_same_run(free, before, ALONE)
    assert config_hash(free) == config_hash(before) and len(config_hash(before)) == 64
    decisive = (
        {"optim": {"lr": 1.0}},
        {"train": {"precision": "fp32"}},
        {"augment": {"mix_group": 16}},
        {"model": {"switches": {"cpe": False}}},
        {"seed": 1},
    )
    assert len({config_hash(changed(**sections)) for sections in decisive} | {config_hash(before)}) == 6


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("optim.lrr", "did you mean 'optim.lr'?"),
        ("optimm", "did you mean 'optim'?"),
        ("lr", "must list keys, sections or `data`, got 'lr'"),
        ("nonsense", "remove it; `pervit config` lists the keys."),
    ],
)
def test_an_unknown_name_is_an_error_even_at_the_first_start(name: str, expected: str) -> None:
    """Guards against an override with a typo, found only when it is needed."""
    with pytest.raises(UserError) as error:
        check_same_run(changed(checkpoint={"accept": [name]}), None, ALONE)
    assert f"checkpoint.accept must list keys, sections or `data`, got {name!r}" in str(error.value) and expected in str(
        error.value
    )


def test_another_data_set_is_refused_unless_it_is_accepted(digits_shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a run whose second half is trained on other images, and against accepting them with other keys of `data`."""
    console.install()
    config = changed(data={"path": str(digits_shards)})
    train, val = (ShardSet(digits_shards, split).identity() for split in ("train", "val"))
    check_same_data(config, train, train, ALONE)
    check_same_data(config, None, train, ALONE)
    with pytest.raises(UserError) as error:
        check_same_data(config, train, val, ALONE)
    prints = f"fingerprint={train['fingerprint'][:12]} (got {val['fingerprint'][:12]})"
    for part in ("samples=1438 (got 359)", prints, str(digits_shards), "checkpoint.accept=[data]."):
        assert part in str(error.value)
    assert "shard_seed" not in str(error.value)  # is the same
    accepting = changed(data={"path": str(digits_shards), "flip": 0.1}, checkpoint={"accept": ["data"]})
    check_same_data(accepting, train, val, ALONE)
    assert capsys.readouterr().out.count("samples=1438 (got 359)") == 1
    assert "accept=[data.flip]" in refusal(accepting, changed())


@pytest.mark.multiprocess
def test_a_start_that_is_refused_leaves_nothing(small_run: Path, tmp_path: Path) -> None:
    """Guards against a folder for every mistake in a config, and against the loss of one that was there before."""
    (tmp_path / "mine").mkdir()
    for folder, override in (("new", "checkpoint.accept=[nonsense]"), ("mine", "train.init_from=nowhere")):
        result = run_forked("pipeline.train", "--config", small_run, f"output_dir={tmp_path / folder}", override, check=False)
        assert result.returncode == 2 and ("nonsense" in result.stderr or "nowhere" in result.stderr), result.stderr
    assert not (tmp_path / "new").exists() and (tmp_path / "mine").is_dir()


def test_a_refusal_reaches_every_process(tmp_path: Path) -> None:
    """Guards against processes that wait for ever for the main one, which was refused; and against a lock that two runs hold."""

    (tmp_path / "held").mkdir()
    holding = "import sys; from pathlib import Path; from pipeline.training.folder import RunLock; lock = RunLock.take(Path(sys.argv[1])); "
    environment = clean_environment(PYTHONPATH=str(REPOSITORY))
    with subprocess.Popen(
        [sys.executable, "-c", holding + "print('held', flush=True); sys.stdin.read()", str(tmp_path / "held")],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout.readline() == "held\n"
        pair = [
            subprocess.Popen(
                [sys.executable, "-c", PAIR, str(tmp_path), str(rank)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in (0, 1)
        ]
        refused = [(process.communicate(timeout=PATIENCE), process.returncode) for process in pair]
    for (out, err), code in refused:
        assert (out, code) == ("opened\n", 2), err
        assert f"held is being trained by process {holder.pid} on" in err and "Traceback" not in err


def test_no_run_goes_on_with_another_optimizer() -> None:
    """Guards against moments of one optimizer that another takes for its own, and a layer-wise decay that changes in silence."""
    assert refusal(changed(optim={"name": "lamb"}, checkpoint={"accept": ["optim"]}), changed()) == (
        "runs/x was started with optim.name=adamw, got lamb: set it back, or choose another output_dir (no run can continue with "
        "another optim.name, so that cannot be accepted)."
    )
    assert "started with optim.layer_decay=None, got 0.75" in refusal(changed(optim={"layer_decay": 0.75}), changed())
