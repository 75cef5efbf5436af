"""A set of 100,000 classes: sharded, trained on, evaluated, watched and reported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data_prep.sources import ImageFolder
from data_prep.writer import write_shards
from pipeline.shards.manifest import ShardManifest
from support.ranks import run_forked
from support.runs import evaluation_rows, step_rows, write_small_config
from support.small_run import SMALL_MODEL

pytestmark = [pytest.mark.multiprocess, pytest.mark.long]

CLASSES = 100_000


def test_a_hundred_thousand_classes(digits_images: Path, tmp_path: Path) -> None:
    """Guards against files, pages and times that grow with the square of the classes; most of them have no image."""
    shards, run = tmp_path / "shards", tmp_path / "run"
    for split, every in (("train", 69), ("val", 4 * 69)):  # classes with images in both
        source = ImageFolder(digits_images, split)
        source.class_names = [f"n{number:08d}" for number in range(CLASSES)]
        source.labels = (np.arange(len(source)) * every).astype(np.int32)
        assert write_shards(source, shards, split)
    assert len(ShardManifest.read(shards).classes) == CLASSES
    options = ("train.max_steps=2", "eval.every_epochs=0.01", f"model.num_classes={CLASSES}", f"output_dir={run}")
    run_forked("pipeline.train", "--config", write_small_config(shards, tmp_path), *SMALL_MODEL, *options)
    assert [row["step"] for row in step_rows(run)] == [1, 2] and step_rows(run)[0]["loss"] == pytest.approx(
        np.log(CLASSES), rel=0.02
    )
    for row in evaluation_rows(run):
        assert len(row["class_count"]) == CLASSES and sum(row["class_count"]) == row["count"] == 359
    assert "finished at step 2" in run_forked("pipeline.watch", run, "--once").stdout
    run_forked("pipeline.evaluate", run, "--data", shards, "--predictions", run / "predictions.csv")
    run_forked("pipeline.report", run, "--output", tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 20 << 20
