"""Where a run's images are decoded: as ``data.decode`` says, as the run was begun, or where its first steps are faster."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pipeline.config import Config
from pipeline.data.batches import TrainBatches
from pipeline.data.decoding_trial import TrialLoader, Turns
from pipeline.data.loader import AUTO, CPU, GPU, Loader, decoding_device
from pipeline.data.mixed_set import MixedSet
from pipeline.data.reader import BadSamples
from pipeline.data.shards import ShardSet
from pipeline.distributed.world import World
from pipeline.logs import console


def choose_decoding(asked: str, begun_with: str | None, world: World, repeatable: bool = False) -> str:
    """Settle ``data.decode`` for training, on all ranks alike without communication.

    Args:
        asked: "auto", "gpu" or "cpu".
        begun_with: that of the run so far, which "auto" keeps; "auto" or None while it is not known.
        world: rank 0 logs the reason.
        repeatable: the run repeats its pixels whenever it is begun: "auto" then is the GPU, because a measurement may differ.

    Returns:
        "gpu", "cpu", or "auto": to be measured.

    Raises:
        UserError: it cannot be done here.
    """
    decoding_device(asked, world.device)
    if asked != AUTO or world.device.type == "cpu":
        return asked
    if begun_with not in (GPU, CPU):
        return GPU if repeatable else AUTO
    if world.is_main:
        console.say(
            f"decoding on the {begun_with.upper()}, as this run has measured before: data.decode=gpu or cpu changes that"
        )
    return begun_with


def training_loader(
    shards: ShardSet | MixedSet, config: Config, decode: str, world: World, first_step: int
) -> Loader[TrainBatches] | TrialLoader:
    """This process's micro-batches from the first one of step ``first_step`` on.

    Args:
        shards: the training split.
        config: of the run.
        decode: from :func:`choose_decoding`.
        world: all ranks.
        first_step: steps done before.
    """
    batches = TrainBatches(
        shards=shards,
        seed=config.seed,
        image_size=config.model.image_size,
        global_batch_size=config.train.global_batch_size,
        batch_size=config.train.micro_batch,
        rank=world.rank,
        world_size=world.size,
        data=config.data,
        augment=config.augment,
    )
    start = first_step * batches.batches_per_step
    if decode != AUTO or world.device.type == "cpu":
        data = config.data.model_copy(update={"decode": decode})
        return Loader(batches, data, world.device, world.cpu_threads, start)

    def open_loader(numbers: Iterator[int], decode: str, bad: BadSamples) -> Loader[TrainBatches]:
        data = config.data.model_copy(update={"decode": decode})
        return Loader(batches, data, world.device, world.cpu_threads, numbers, bad)

    turns = Turns.of_steps(start, config.data.prefetch, batches.batches_per_step)
    if world.is_main:
        console.say(
            f"decoding on the GPU and on the CPU in turns for {turns.total} micro-batches, to keep the faster: "
            f"data.decode=gpu or cpu settles it"
        )
    return TrialLoader(
        batches, turns, BadSamples(shards, config.data.max_bad_samples), open_loader, partial(keep_faster, world)
    )


def keep_faster(world: World, seconds: dict[str, float]) -> str:
    """The way of decoding with which the slowest rank is faster. Collective.

    Args:
        world: all ranks.
        seconds: what a micro-batch of training took on this rank, by ``data.decode``.
    """
    of_ranks = world.gather(seconds)
    slowest = {decode: max(each[decode] for each in of_ranks) for decode in (GPU, CPU)}
    kept, other = sorted(slowest, key=lambda decode: slowest[decode])
    if world.is_main:
        console.say(
            f"decoding on the {kept.upper()} from now on: a micro-batch takes {1e3 * slowest[kept]:.1f} ms, and "
            f"{1e3 * slowest[other]:.1f} ms with the {other.upper()} decoding"
        )
    return kept


def with_decoding(config: Config, decode: str) -> Config:
    """The config with ``data.decode`` as settled so far."""
    return config.model_copy(update={"data": config.data.model_copy(update={"decode": decode})})
