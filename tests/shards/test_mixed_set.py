"""Several shard sets as one training split."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from pipeline.config import Config, config_from_dict, load_config
from pipeline.errors import UserError
from pipeline.loader.batches import TrainBatches
from pipeline.shards.mixed_set import MixedSet, open_training_set
from pipeline.shards.shard_set import ShardSet
from pipeline.stream.samples import DamagedSample
from support.launching import run_script
from support.ranks import Job, run_forked
from support.small_run import SMALL_MODEL

CHOSEN = ("7", "3")  # classes of the further set: two of the ten digits


@pytest.fixture(scope="module")
def few(digits_images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shard set of two of the classes, called 3 and seven."""
    folder = tmp_path_factory.mktemp("few")
    for name in CHOSEN:
        shutil.copytree(digits_images / "val" / name, folder / "images" / "train" / name)
    run_script("data_prep/shard_imagenet.py", "--source", folder / "images", "--output", folder / "shards", "--split", "train")
    return folder / "shards"


def test_samples_are_those_of_their_sets_with_the_labels_of_the_first(digits_shards: Path, few: Path) -> None:
    """Guards against labels of the further set's own numbering, which teach the model wrong classes."""
    first, second = ShardSet(digits_shards, "train"), ShardSet(few, "train")
    mixed = open_training_set(digits_shards, {str(few): 2.0})
    assert isinstance(mixed, MixedSet) and len(mixed) == len(first) + len(second)
    indices = np.array([5, len(first) + 3, len(first), len(first) - 1, len(mixed) - 1])
    rows = mixed.samples[indices]
    for row, index in zip(rows, indices.tolist()):
        one, own = (first, index) if index < len(first) else (second, index - len(first))
        assert np.array_equal(mixed.read(index), one.read(own)) and row["bytes"] == one.samples[own]["bytes"]
        assert mixed.classes[row["label"]] == one.classes[one.samples[own]["label"]]
    assert mixed.key(5) == first.key(5) and mixed.key(len(first)) == f"{second.key(0)} of {few}"
    assert "sample 00000000 is odd" in str(mixed.damaged(len(first), "is odd")).replace(second.key(0), "00000000")
    mixed.will_need([(len(first), 10), (0, 3)])


def test_what_identifies_it(digits_shards: Path, few: Path) -> None:
    """Guards against a resume with other weights or sets, and against one that is refused because sets were moved."""
    mixed = open_training_set(digits_shards, {str(few): 0.5})
    found = mixed.identity()
    assert (
        found["samples"]
        == mixed.mixture.images
        == len(ShardSet(digits_shards, "train")) + round(0.5 * len(ShardSet(few, "train")))
    )
    assert found["mix"] != open_training_set(digits_shards, {str(few): 0.25}).identity()["mix"]
    moved = few.parent / "moved"
    moved.symlink_to(few)
    assert open_training_set(digits_shards, {str(moved): 0.5}).identity() == found
    assert json.loads(json.dumps(found)) == found
    assert open_training_set(digits_shards, {}).identity() == ShardSet(digits_shards, "train").identity()


def test_a_damaged_sample_has_its_number_in_the_mixture(digits_shards: Path, few: Path, tmp_path: Path) -> None:
    """Guards against a bad image of a further set that is replaced in the first."""
    shutil.copytree(few, tmp_path / "few")
    second = ShardSet(few, "train")
    with open(tmp_path / "few" / second.info.shards[0].file, "r+b") as tar:
        tar.seek(int(second.samples["offset"][4]) + 9)
        tar.write(b"damage")
    mixed = open_training_set(digits_shards, {str(tmp_path / "few"): 1.0})
    bad = len(mixed) - len(second) + 4
    with pytest.raises(DamagedSample, match="was changed after it was written") as damage:
        mixed.read(bad)
    assert damage.value.index == bad and str(tmp_path / "few") in str(damage.value)


@pytest.mark.parametrize("order", ["full", "block"])
def test_ranks_share_the_mixture_whatever_their_number(order: str, digits_shards: Path, few: Path) -> None:
    """Guards against samples that depend on the world size."""
    mixed = open_training_set(digits_shards, {str(few): 1.5})
    config = Config(data={"order": order, "block_size": 16, "window_blocks": 4})

    def global_batch(ranks: int, step: int) -> list[tuple[int, int]]:
        sizes = {"image_size": 32, "global_batch_size": 64, "batch_size": 8, "world_size": ranks}
        parts = [
            TrainBatches(shards=mixed, seed=3, rank=rank, data=config.data, augment=config.augment, **sizes)
            for rank in range(ranks)
        ]
        requests = [batches.request(step * batches.batches_per_step + part) for part in range(8 // ranks) for batches in parts]
        assert all(batches.epoch_length == mixed.mixture.images for batches in parts)
        return [(int(i), int(label)) for each in requests for i, label in zip(each.index, each.label)]

    for step in (0, 20, 40):  # epochs are of 23 steps or so
        assert global_batch(1, step) == global_batch(2, step) == global_batch(4, step)


def test_bad_input_is_one_sentence(digits_shards: Path, few: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.mix: shard folder nowhere does not exist: set data.mix to"):
        open_training_set(digits_shards, {"nowhere": 1.0})
    (tmp_path / "again").symlink_to(digits_shards)
    for twice in ({str(tmp_path / "again"): 1.0}, {str(few): 1.0, f"{few}/.": 2.0}):
        with pytest.raises(
            UserError, match="^data.mix must name different sets, got .* and .*, which are the same place: remove one of them"
        ):
            open_training_set(digits_shards, twice)
    with pytest.raises(
        UserError,
        match=rf"data.mix: the classes of {digits_shards} must be among those of {few}, got 8 others \(0, 1, 2, ...\)",
    ):
        open_training_set(few, {str(digits_shards): 1.0})
    for mix, said in (
        ({"x": 0}, r"data.mix\['x'\] must be positive, got 0"),
        ({"x": 1, "y": -1}, r"data.mix\['y'\] must be positive, got -1"),
        ({"x": True}, "data.mix must have a number as the weight of 'x', got true"),
        ({"data/imagenet": 1}, "data.mix must not hold data.path"),
        (["x"], "write data.mix.NAME=VALUE"),
    ):
        with pytest.raises(UserError, match=said) as error:
            config_from_dict({"data": {"mix": mix}}, "a.yaml")
        assert "data.mix" in str(error.value) or "data: mix" in str(error.value), error.value


def test_a_run_is_killed_and_goes_on_with_another_number_of_processes(small_run: Path, few: Path, tmp_path: Path) -> None:
    """Guards against samples of a mixture that are lost or come twice over a resume."""
    mix = f"data.mix={{{few}: 3}}"
    options = (
        *SMALL_MODEL,
        mix,
        "log.samples=true",
        "checkpoint.every_steps=1",
        "train.max_steps=4",
        "augment.rand_augment_ops=0",
    )
    whole = run_forked("pipeline.train", "--config", small_run, *options, f"output_dir={tmp_path / 'whole'}")
    assert "an epoch mixes" in whole.stdout and str(few) in whole.stdout
    parted = ("--config", small_run, *options, f"output_dir={tmp_path / 'parted'}")
    Job(2, *parted, "train.max_steps=2").succeed()
    refused = run_forked("pipeline.train", *parted, f"data.mix={{{few}: 2}}", check=False)
    assert refused.returncode == 2 and "was started with another data set" in refused.stderr and "mix=" in refused.stderr
    Job(1, *parted).succeed()

    def trained_on(name: str) -> dict[int, set]:
        steps: dict[int, set] = {}
        for file in (tmp_path / name / "samples").iterdir():
            for row in map(json.loads, file.read_text().splitlines()):
                steps.setdefault(row["step"], set()).update(
                    zip(row["epoch"], row["position"], row["sample"], row["augmentation"])
                )
        return steps

    assert trained_on("whole") == trained_on("parted") and sorted(trained_on("whole")) == [1, 2, 3, 4]
    samples = [sample for rows in trained_on("whole").values() for _, _, sample, _ in rows]
    assert any(sample >= len(ShardSet(load_config(small_run).data.path, "train")) for sample in samples)
