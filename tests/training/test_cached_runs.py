"""A run with a cache is the run that it is without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config import Config, is_free
from pipeline.training.folder import config_hash
from support.ranks import train
from support.runs import step_rows


@pytest.mark.multiprocess
def test_a_run_goes_on_with_a_cache_and_learns_the_same(small_run: Path, tmp_path: Path) -> None:
    """Guards against a run that a cache changes, or that refuses to be resumed on a node with one or without."""
    plain, cached = tmp_path / "plain", tmp_path / "cached"
    cache = (f"data.cache={tmp_path / 'cache'}", "data.cache_gib=1")
    train(2, small_run, plain, "train.max_steps=4").succeed()
    train(2, small_run, cached, "train.max_steps=2").succeed()
    job = train(2, small_run, cached, "train.max_steps=4", *cache).succeed()
    assert [row["loss"] for row in step_rows(cached)] == [row["loss"] for row in step_rows(plain)]
    assert len(step_rows(cached)) == 4 and "warning" not in job.outputs()
    assert any((tmp_path / "cache").iterdir())


def test_the_cache_is_no_part_of_what_a_run_is() -> None:
    """Guards against a former run that is refused because of a new key."""
    plain = Config.model_validate({"output_dir": "runs/x"})
    cached = Config.model_validate({"output_dir": "runs/x", "data": {"cache": "/nvme", "cache_gib": 2}})
    assert is_free("data.cache") and is_free("data.cache_gib") and config_hash(plain) == config_hash(cached)
