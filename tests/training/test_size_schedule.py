"""data.size_schedule: the side of training images follows from the epoch, and a run resumes with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeline import ImageLoader
from pipeline.checkpoint.weights import read_weights
from pipeline.cluster.world import World
from pipeline.config import AugmentConfig, config_from_dict
from pipeline.errors import UserError
from pipeline.loader.loader import Loader
from pipeline.loader.trial import SizedLoader
from pipeline.shards.shard_set import ShardSet
from pipeline.training.building import check_alone
from support.batches import train_batches
from support.ranks import run_forked
from support.runs import step_rows
from support.small_run import SMALL_MODEL

CPU = torch.device("cpu")
SCHEDULE = [[0, 24], [1, 32], [2, 48]]
EVERYTHING = {"rand_augment_ops": 2, "erasing": 0.25, "mixup": 0.8, "cutmix": 1.0, "mix_group": 4}


def test_the_side_follows_from_the_number_of_the_batch(digits_shards: Path) -> None:
    """Guards against a resumed run whose images have another side, and against steps whose micro-batches differ in it."""
    data = config_from_dict(
        {"data": {"size_schedule": SCHEDULE, "num_threads": 1}, "model": {"image_size": 48}}, source="a test"
    ).data
    shards = ShardSet(digits_shards, "train")
    options = {"image_size": 48, "data": data, "augment": AugmentConfig(**EVERYTHING)}
    batches = train_batches(shards, global_batch=720, micro_batch=72, rank=1, world_size=2, **options)
    sides = [batches.side(i) for i in range(25)]
    assert (
        sides == [24] * 10 + [32] * 10 + [48] * 5
    )  # steps of 5 batches begin with the images 0, 720, 1440, 2160, 2880; 1438 an epoch

    def loader(start: int) -> SizedLoader:
        return SizedLoader(batches, start, lambda sized, start, _: Loader(sized, data, CPU, start=start))

    straight = loader(0)
    images = [next(straight).images for _ in range(22)]
    straight.close()
    assert [image.shape[2] for image in images] == sides[:22]
    for start in (8, 10, 19):
        resumed = loader(start)
        for i in range(start, min(start + 3, 22)):
            assert torch.equal(next(resumed).images, images[i])
        resumed.close()
    (plain,) = [Loader(replace(batches, image_size=32), data, CPU, start=12)]
    assert torch.equal(next(plain).images, images[12])
    plain.close()


def test_the_area_of_images_is_summed_over_epochs() -> None:
    """Guards against a time left that takes small images for the pace of the large ones to come."""
    data = config_from_dict({"data": {"size_schedule": SCHEDULE}}, source="a test").data
    assert data.area_until(0.5, 48) == 0.5 * 24**2
    assert data.area_until(3.5, 48) == 24**2 + 32**2 + 1.5 * 48**2
    late = config_from_dict({"data": {"size_schedule": [[2, 32]]}}, source="a test").data
    assert late.area_until(3, 48) == 2 * 48**2 + 32**2 and late.area_until(1, 48) == 48**2
    assert config_from_dict({}, source="a test").data.area_until(3.5, 48) == 3.5 * 48**2


def test_image_loader_changes_its_size(digits_shards: Path) -> None:
    """Guards against a loader that keeps its first size, and against a state that forgets it."""
    options = {
        "image_size": 48,
        "device": "cpu",
        "threads": 1,
        "augment": {"mixup": 1.0},
        "data": {"size_schedule": SCHEDULE[1:]},
    }
    loader, resumed = (ImageLoader(digits_shards, batch_size=720, **options) for _ in range(2))
    sizes, state = [], {}
    for _ in range(3):
        for images, _ in loader:
            sizes.append(tuple(images.shape[2:]))
            state = state or (loader.state_dict() if len(sizes) == 3 else {})
            if len(sizes) == 4:
                resumed.load_state_dict(state)
                assert torch.equal(next(iter(resumed))[0], images)
    assert sizes == [(48, 48)] * 2 + [(32, 32)] * 2 + [(48, 48)] * 2
    loader.close()
    resumed.close()


@pytest.mark.long
@pytest.mark.multiprocess
def test_a_run_resumes_across_a_change_of_size(small_run: Path, tmp_path: Path) -> None:
    """Guards against a training that learns something else if it was restarted before its images change their size."""
    sizes = ("model.image_size=48", "data.size_schedule=[[0, 32], [1, 48]]")
    options = ("--config", small_run, SMALL_MODEL[0], *sizes, "train.global_batch_size=720", "train.micro_batch_size=144")
    runs = []
    for name, ends in (("straight", (3,)), ("resumed", (1, 3))):  # the third step begins in the second epoch
        for end in ends:
            run_forked("pipeline.train", *options, f"output_dir={tmp_path / name}", f"train.max_steps={end}")
        rows = step_rows(tmp_path / name)
        runs.append((read_weights(tmp_path / name).model, [row["loss"] for row in rows]))
    (straight, losses), (resumed, again) = runs
    assert losses == again and len(losses) == 3
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"data": {"size_schedule": [[0, 300]]}},
            "data.size_schedule must have sides of at most model.image_size 224, got 300",
        ),
        ({"data": {"size_schedule": [[3, 100], [1, 200]]}}, "data.size_schedule must have each epoch once, in ascending order"),
        ({"data": {"size_schedule": [[0, 3]]}}, "data.size_schedule must be at least 5, got 3"),
        (
            {"data": {"size_schedule": [[0, 160]]}, "train": {"compile": "graphs"}},
            "data.size_schedule requires another train.compile than graphs",
        ),
        (
            {"data": {"size_schedule": [[0, 160]]}, "model": {"name": "deit_t"}},
            "data.size_schedule requires a model that takes 160 pixels: an image has 160 x 160 pixels",
        ),
        ({"data": {"size_schedule": [[0, 160], [2, 150]]}}, "data.size_schedule requires a model that takes 150 pixels"),
    ],
)
def test_a_schedule_that_does_not_fit_is_one_sentence(values: dict, said: str) -> None:
    """Guards against a run that fails in the epoch in which the size changes."""
    with pytest.raises(UserError) as error:
        check_alone(config_from_dict(values, source="a test"), World(0, 1, CPU, 1))
    assert said in str(error.value)
