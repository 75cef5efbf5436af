"""A run with a cache is the run that it is without one."""

from __future__ import annotations

from pathlib import Path

from pipeline.config import Config
from pipeline.run.folder import config_hash
from pipeline.run.run_keys import is_free
from support.launching import run_module
from support.runs import step_rows


def test_a_run_goes_on_with_a_cache_and_learns_the_same(small_run: Path, tmp_path: Path) -> None:
    """Guards against a run that a cache changes, or that refuses to be resumed on a node with one or without."""
    common = ("--config", small_run, "train.deterministic=true", "checkpoint.every_steps=2", "log.every_steps=1")
    cache = (f"data.cache={tmp_path / 'cache'}", "data.cache_gib=1")
    run_module("pipeline.train", *common, f"output_dir={tmp_path / 'plain'}", "train.max_steps=4")
    cached = (*common, f"output_dir={tmp_path / 'cached'}")
    run_module("pipeline.train", *cached, "train.max_steps=2")
    result = run_module("pipeline.train", *cached, *cache, "train.max_steps=4")
    losses = [[row["loss"] for row in step_rows(tmp_path / name)] for name in ("plain", "cached")]
    assert losses[0] == losses[1] and len(losses[0]) == 4 and "warning" not in result.stderr
    assert list((tmp_path / "cache").iterdir())


def test_the_cache_is_no_part_of_what_a_run_is() -> None:
    """Guards against a former run that is refused because of a new key."""
    plain = Config.model_validate({"output_dir": "runs/x"})
    cached = Config.model_validate({"output_dir": "runs/x", "data": {"cache": "/nvme", "cache_gib": 2}})
    assert is_free("data.cache") and is_free("data.cache_gib") and config_hash(plain) == config_hash(cached)
