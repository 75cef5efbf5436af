"""ImageLoader refuses wrong settings and states of other loaders by a sentence, and takes rank and cores from the launcher."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from pipeline import ImageLoader
from pipeline.errors import UserError
from support.batches import SAMPLES, SMALL


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"augment": {"mixup": 0.5}, "batch_size": 12}, "augment.mix_group must divide"),
        ({"augment": {"mixupp": 0.5}}, "mixupp"),
        ({"augment": "deit_z"}, "deit_z"),
        ({"rank": 2, "world_size": 2}, "rank must be from 0 to world_size - 1, got 2 of 2"),
        ({"rank": 2}, "rank must be from 0 to world_size - 1, got 2 of None: pass both or neither"),
        ({"split": "test"}, "must have the split 'test', but manifest.json lists only"),
        ({"drop_last": True, "batch_size": 2000}, "drop_last=True leaves none of an epoch's 1438 images"),
        ({"threads": 0}, "data.num_threads"),
        ({"labels": [1, 2]}, "labels must have numbers for each of 1438 samples, got int64 of shape (2,)"),
        ({"labels": np.zeros(SAMPLES), "sampling": "balanced"}, "sampling='balanced' requires labels"),
        ({"sampling": np.full(SAMPLES, -1)}, "sampling must be weights of at least 0"),
        ({"sampling": "even"}, "sampling must have numbers for each"),
        ({"sampling": "balanced", "shuffle": False}, "sampling requires shuffle=True"),
        ({"data": {"size": 3}}, "unknown key 'data.size'"),
    ],
)
def test_a_wrong_setting_is_one_sentence(options: dict, said: str, digits_shards: Path) -> None:
    """Guards against tracebacks from deep inside, and against a setting that is passed over."""
    with pytest.raises(UserError) as error:
        ImageLoader(digits_shards, **{**SMALL, "augment": {}, **options})
    assert said in str(error.value)
    with pytest.raises(UserError, match="shard folder /nowhere does not exist: set path to the folder"):
        ImageLoader("/nowhere", **SMALL)


def test_a_state_of_another_loader_is_refused(digits_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a state that would leave out samples unnoticed; rank and size come from the environment."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    loader = ImageLoader(digits_shards, batch_size=16, augment={}, **SMALL)
    assert len(loader) == 45
    other = ImageLoader(digits_shards, batch_size=16, augment={}, seed=3, **SMALL)
    for state, said in (
        (other.state_dict(), "the state must be of a loader with seed 0, got 3"),
        ({**loader.state_dict(), "position": SAMPLES}, "the state must be one of state_dict"),
        ({"epoch": -1, "position": 0, "stream": {}}, "the state must be one of state_dict"),
        ("x", "the state must be one of state_dict(), got 'x'"),
    ):
        with pytest.raises(UserError) as error:
            loader.load_state_dict(state)
        assert said in str(error.value)
    monkeypatch.delenv("RANK")
    with pytest.raises(UserError, match="WORLD_SIZE 2 requires RANK, which is not set"):
        ImageLoader(digits_shards, augment={}, **SMALL)
    loader.close()
    other.close()
    assert os.environ["WORLD_SIZE"] == "2"


def test_a_slurm_step_on_two_nodes_tells_rank_and_cores(digits_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a loader that divides a node's cores among the ranks of all nodes, and ranks that all take the first one's images."""
    step = {"STEP_ID": "0", "PROCID": "3", "STEP_NUM_TASKS": "4", "LOCALID": "1", "STEP_TASKS_PER_NODE": "2(x2)"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_CPUS_PER_TASK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in step.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    loader = ImageLoader(digits_shards, batch_size=16, augment={}, image_size=32, device="cpu")
    assert (loader._batches.rank, loader._batches.world_size, loader._threads) == (3, 4, 6)
    loader.close()
    assert "RANK" not in os.environ
