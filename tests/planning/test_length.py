"""The length of a run, and how it is divided into jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config import load_config
from pipeline.errors import UserError
from pipeline.planning.length import Images, count_images, jobs_within, length_of, measure_loader, parse_time_limit
from pipeline.stores.place import place_argument
from pipeline.stream.schedule import Schedule
from support.runs import write_small_config
from support.stores import nginx


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["train.epochs=0.3", "eval.every_epochs=0.1"],
        ["train.epochs=7.5", "eval.every_epochs=2", "train.global_batch_size=96", "checkpoint.every_steps=7"],
        ["train.epochs=20", "optim.cooldown_epochs=2.5", "eval.every_epochs=null", "checkpoint.every_steps=null"],
        ["train.epochs=9", "eval.every_epochs=0.01", "train.max_steps=13"],
        ["train.epochs=5", "augment.repeats=1", "eval.every_epochs=1.5"],
    ],
)
def test_it_is_the_schedule_of_a_run(overrides: list[str]) -> None:
    """Guards against hours of another schedule than that which trains."""
    small = ["train.epochs=2", "train.global_batch_size=256", "train.micro_batch_size=32"]
    config = load_config("configs/pervit_t.yaml", [*small, *overrides])
    images = Images(3000, 500, 1.0, "")
    length = length_of(config, images)
    epoch = 3000 if config.augment.repeats == 1 else 2816
    real = Schedule(
        epoch, config.train.global_batch_size, config.train.epochs, config.train.max_steps, config.optim.cooldown_epochs
    )
    assert length.steps == real.last_step
    assert length.evaluations == sum(real.passes(step, config.eval.every_epochs) for step in range(1, real.last_step + 1))
    every = config.checkpoint.every_steps
    saves = sum(step == real.last_step or bool(every and step % every == 0) for step in range(1, real.last_step + 1))
    assert length.saves == saves


def test_images_are_counted_where_they_are(digits_shards: Path, tmp_path: Path) -> None:
    """Guards against the size of ImageNet for a run on other data."""
    config = load_config(write_small_config(digits_shards, tmp_path), [])
    found = count_images(config, None)
    assert found and found.train + found.val == 1797 and found.source == str(digits_shards)
    moved = tmp_path / "moved"
    moved.symlink_to(digits_shards)
    mixed = count_images(load_config(write_small_config(digits_shards, tmp_path), [f"data.mix={{{moved}: 0.5}}"]), None)
    assert (
        mixed and mixed.train == found.train + round(found.train / 2) and mixed.val == found.val and "data.mix" in mixed.source
    )
    elsewhere = load_config(write_small_config(tmp_path / "none", tmp_path), ["model.num_classes=1000"])
    known = count_images(elsewhere, None)
    assert known and known.train == 1_281_167 and "ImageNet-1k" in known.source and "--data" in known.source
    assert count_images(load_config(write_small_config(tmp_path / "none", tmp_path), ["model.num_classes=17"]), None) is None
    with pytest.raises(UserError, match="manifest.json is missing"):
        count_images(config, tmp_path)
    with pytest.raises(UserError, match="model.num_classes must be the 10 classes of .*, got 1000: set model.num_classes=10"):
        count_images(elsewhere, digits_shards)


def test_images_and_the_loader_are_measured_in_a_store(digits_shards: Path, tmp_path: Path) -> None:
    """Guards against --data that takes a folder only."""
    pytest.importorskip("obstore", reason="needs the extra `remote`")
    config = load_config(write_small_config(digits_shards, tmp_path), [])
    with nginx(digits_shards.parent, tmp_path / "nginx") as port:
        place = place_argument(f"http://127.0.0.1:{port}/{digits_shards.name}")
        found = count_images(config, place)
        assert found and found.train == 1438 and found.source == str(place)
        need, local = (measure_loader(config, each, threads=1, seconds=0.0) for each in (place, digits_shards))
        assert need.bytes == local.bytes and need.cpu_seconds > 0


@pytest.mark.parametrize(
    "text, seconds",
    [("90", 5400), ("30:30", 1830), ("24:00:00", 86400), ("1-12", 129600), ("3-00:00:00", 259200), ("1-02:30", 95400)],
)
def test_time_limits_are_slurms(text: str, seconds: float) -> None:
    """Guards against minutes that are read as hours."""
    assert parse_time_limit(text) == seconds


@pytest.mark.parametrize("text", ["soon", "", "-1", "1:2:3:4", "24h", "5", "1.5"])
def test_other_time_limits_are_refused(text: str) -> None:
    """Guards against a silent guess."""
    with pytest.raises(UserError, match="--time-limit must be .*24:00:00"):
        parse_time_limit(text)


def test_jobs_have_their_starts_and_their_last_minutes() -> None:
    """Guards against jobs that train from their first second to their last."""
    assert jobs_within(3000, 3600, 100) == 1
    assert jobs_within(3201, 3600, 100) == 2
    with pytest.raises(UserError, match="must leave time to train after a start of 700 seconds, got 900"):
        jobs_within(10, 900, 700)
