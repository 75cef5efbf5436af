"""data.decode: what a machine without a GPU refuses, and that measuring both ways of decoding changes nothing of the stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.cluster.world import World
from pipeline.config import AugmentConfig, Config, DataConfig
from pipeline.errors import UserError
from pipeline.loader.batches import TrainBatches
from pipeline.loader.loader import Batch, Loader, decoding_device
from pipeline.loader.reader import BadSamples
from pipeline.loader.trial import TrialLoader, Turns
from pipeline.shards.shard_set import ShardSet
from pipeline.training.building import choose_decoding, keep_faster
from pipeline.training.folder import config_hash
from support.ranks import run_forked

CPU = torch.device("cpu")
CONFIG = DataConfig(num_threads=1, prefetch=1)


class SlowLoader(Loader[TrainBatches]):
    """As if decoding took longer than a step."""

    def __next__(self) -> Batch:
        time.sleep(0.05)
        return super().__next__()


class SeveralRanks(World):
    """This rank, and what the others say."""

    def gather(self, value: object) -> list:
        return [value, {"gpu": 0.030, "cpu": 0.060}]


def batches_of(shards: Path, order: str = "full") -> TrainBatches:
    return TrainBatches(
        shards=ShardSet(shards, "train"),
        seed=7,
        image_size=32,
        global_batch_size=32,
        batch_size=8,
        rank=1,
        world_size=2,
        data=DataConfig(order=order, block_size=50, window_blocks=4),
        augment=AugmentConfig(rand_augment_ops=2, erasing=0.25, mixup=0.8, cutmix=1.0, mix_group=4),
    )


def trial(batches: TrainBatches, turns: Turns, slow: str, kept: str, measured: list) -> TrialLoader:
    def open_loader(
        numbers: Iterator[int], decode: str, bad: BadSamples
    ) -> Loader[TrainBatches]:  # here, both decode on the CPU
        return (SlowLoader if decode == slow else Loader)(batches, CONFIG, CPU, start=numbers, bad=bad)

    def choose(seconds: dict[str, float]) -> str:
        measured.append(seconds)
        return kept  # not the faster: on a machine that others use, either may be

    return TrialLoader(batches, turns, BadSamples(batches.shards, 0), open_loader, choose)


@pytest.mark.parametrize("slow", ["gpu", "cpu"])
@pytest.mark.parametrize("start", [0, 83])  # 83: in a second epoch after 7 more batches
def test_a_trial_yields_the_stream_and_measures_both(slow: str, start: int, digits_shards: Path) -> None:
    """Guards against batches that are lost, repeated or exchanged between two turns or at the decision, and against times that
    are noted for the wrong loader."""
    batches, turns, measured = batches_of(digits_shards), Turns(start, settling=2, measured=2), []
    kept = {"gpu": "cpu", "cpu": "gpu"}[slow]
    tried, plain = trial(batches, turns, slow, kept, measured), Loader(batches, CONFIG, CPU, start=start)
    threads = 0
    for i in range(turns.total + 3):
        expected, batch = next(plain), next(tried)
        for name in ("index", "epoch", "position"):
            assert np.array_equal(getattr(batch.request, name), getattr(expected.request, name)), (name, i)
        for name in ("images", "labels", "other_labels", "weight"):
            assert torch.equal(getattr(batch, name), getattr(expected, name)), (name, i)
        threads = max(threads, threading.active_count())
        assert tried.decode == ("auto" if i < turns.total else kept)
    (seconds,) = measured
    assert seconds[slow] > 0.05 and set(seconds) == {"gpu", "cpu"}
    assert threading.active_count() < threads, "the loader that was not kept goes on decoding"
    tried.close(), plain.close()


@pytest.mark.parametrize(("prefetch", "batches_per_step"), [(1, 1), (2, 3), (5, 64)])
def test_turns_are_whole_steps_and_number_every_batch_once(prefetch: int, batches_per_step: int) -> None:
    """Guards against a turn with more optimizer steps than the other's, and against one that only empties queues."""
    turns = Turns.of_steps(7, prefetch, batches_per_step)
    assert turns.settling % batches_per_step == turns.measured % batches_per_step == 0
    assert turns.settling > 2 * prefetch and turns.measured >= 10
    in_turns = [number for place in (0, 1) for number in islice(turns.numbers(place), turns.total // 2)]
    assert sorted(in_turns) == list(range(7, 7 + turns.total))
    for place in (0, 1):
        numbers = list(islice(turns.numbers(place), turns.total))
        assert numbers[turns.total // 2 :] == list(range(7 + turns.total, 7 + turns.total + turns.total // 2))


def test_the_slowest_rank_decides() -> None:
    """Guards against ranks that decide each for itself: one with a slow CPU holds up all others."""
    world = SeveralRanks(0, 2, CPU, 1)
    assert keep_faster(world, {"gpu": 0.050, "cpu": 0.020}) == "gpu"  # this rank alone would take the CPU
    assert keep_faster(world, {"gpu": 0.070, "cpu": 0.020}) == "cpu"


def test_a_run_keeps_what_it_has_measured() -> None:
    """Guards against a resumed run that decodes in another way than before, or insists on a GPU where there is none."""
    here, there = World(0, 1, CPU, 1), World(0, 1, torch.device("cuda", 0), 1)
    assert choose_decoding("auto", "cpu", there) == "cpu" and choose_decoding("auto", "gpu", there) == "gpu"
    assert choose_decoding("auto", "auto", there) == "auto" and choose_decoding("auto", None, there) == "auto"
    assert choose_decoding("gpu", "cpu", there) == "gpu" and choose_decoding("auto", "gpu", here) == "auto"
    assert choose_decoding("auto", None, there, repeatable=True) == "gpu", "what is measured may differ from start to start"
    config = Config()
    assert config_hash(config.with_values({"data.decode": "cpu"})) == config_hash(config), (
        "a checkpoint may say what was measured"
    )


def test_decoding_on_a_gpu_is_refused_where_there_is_none(small_run: Path) -> None:
    """Guards against a traceback of DALI's, and against silently decoding somewhere else than was asked for."""
    sentence = "data.decode is gpu, but this process has no GPU: set it to auto, or start where there is a GPU."
    with pytest.raises(UserError) as error:
        choose_decoding("gpu", None, World(0, 1, CPU, 1))
    assert str(error.value) == sentence
    with pytest.raises(UserError, match="--decode is gpu"):
        decoding_device("gpu", CPU, "--decode")
    run = run_forked("pipeline.train", "--config", small_run, "data.decode=gpu", check=False)
    assert run.returncode == 2 and f"error: {sentence}" in run.stderr, run.stderr
