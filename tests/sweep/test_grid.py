"""The file that ``--grid`` writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import UserError
from pipeline.sweep.__main__ import grid
from pipeline.sweep.lines import parse_sweep


def test_every_combination_once() -> None:
    """Guards against a grid that leaves out a corner, and a value that every line repeats."""
    text = grid(["--config", "demo", "train.epochs=3", "optim.lr=1e-3,5e-4", "seed=0,1"])
    assert text.splitlines() == [
        "all: --config demo train.epochs=3",
        "optim.lr=1e-3 seed=0",
        "optim.lr=1e-3 seed=1",
        "optim.lr=5e-4 seed=0",
        "optim.lr=5e-4 seed=1",
    ]


def test_what_was_written_is_read_as_it_was_meant() -> None:
    """Guards against brackets, spaces, quotes and several configs that do not survive the way through the file."""
    words = ["--config", "pervit_t,deit_s", "data.crop_scale=[0.6, 1.0],[0.8,1.0]", "data.path=/a b,'/c,d'"]
    runs = parse_sweep(Path("s.txt"), grid(words), variables={}).runs
    found = [(run.config.model.name, run.config.data.crop_scale, run.config.data.path) for run in runs]
    assert found == [
        (model, scale, path)
        for model in ("pervit_t", "deit_s")
        for scale in ((0.6, 1.0), (0.8, 1.0))
        for path in ("/a b", "/c,d")
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--grid must have a key with several values, got none"),
        (["seed=1"], "--grid must have a key with several values, got none"),
        (["seed=1,,2"], "seed=1,,2 has an empty value between its commas"),
        (["seed=1,1"], "seed=1,1 has a value twice"),
        (["seed"], "must have words key=value,value, got 'seed'"),
        (["--lr=1,2"], "must have words key=value,value, got '--lr=1,2'"),
        (["--config"], "--config requires a file or a name in configs/, got nothing"),
        (["data.crop_scale=[0.6,1.0", "seed=0,1"], "[0.6,1.0 has a bracket that is not closed"),
        (["data.path='a,b"], "'a,b has a quote that is not closed"),
        (["--config", "demo", "train.seed=0,1"], "unknown key 'train.seed'"),
        (["--config", "demo", "optim.lr=1e-3,0.001"], "is the same run as"),
    ],
)
def test_a_mistake(words: list[str], said: str) -> None:
    """Guards against a file that only its first use shows to be wrong."""
    with pytest.raises(UserError) as error:
        grid(words)
    assert said in str(error.value)
