"""Settle what a config leaves open, once for a start: precision, decoding, compiling, the size of a micro-batch.

Nothing downstream chooses again: what a start builds, logs and records comes from the :class:`Settled` that it gets.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pipeline.checkpoint import RunState
from pipeline.cluster.world import World
from pipeline.config import AUTO, Config, TrainConfig, accumulation_steps, fitting_micro_batches
from pipeline.errors import UserError
from pipeline.loader.loader import CPU, GPU, decoding_device
from pipeline.models import model_of
from pipeline.optim.build import parameter_groups
from pipeline.optim.engine import zero_stage
from pipeline.step.precision import Precision, choose_precision
from pipeline.training.building import say
from pipeline.training.compiling import BLOCKS, GRAPHS, OFF
from pipeline.training.micro_batch import choose_micro_batch

_HOOKED_STAGE = 3  # the ZeRO stage with hooks on every submodule


@dataclass(frozen=True)
class Settled:
    """A start's config with nothing left open, and the reasons."""

    config: Config  # as the run records it: train.precision and train.micro_batch_size are settled
    precision: Precision
    micro_batch_reason: str | None  # None: the config states the size
    decode: str  # "gpu", "cpu", or "auto": measured in the first batches
    compile: str  # "off", "blocks", "model" or "graphs"
    zero_stage: int  # that the engine takes; 0 for one process
    accumulation: int  # micro-batches of a rank per optimizer step


def settle(config: Config, before: RunState | None, world: World) -> Settled:
    """Settle a config for all ranks alike. Collective.

    Args:
        config: of this start, which :func:`check_alone` has accepted.
        before: the checkpoint that it resumes from, which ``auto`` follows; None: a new run.

    Raises:
        UserError: on every rank: images cannot be decoded as asked, or no micro-batch fits.
    """
    recorded = before.config if before else {"train": {}, "data": {}}
    precision = choose_precision(config.train.precision, recorded["train"].get("precision"), world)
    decode = choose_decoding(config.data.decode, recorded["data"].get("decode"), world, config.train.deterministic)
    config = config.with_values({"train.precision": precision.name})
    size, reason = choose_micro_batch(config, recorded["train"].get("micro_batch_size"), world)
    config = config.with_values({"train.micro_batch_size": size})
    compilation, stage = choose_compilation(config.train, world), zero_stage(config, world.size)
    accumulation = accumulation_steps(config.train, world.size, config.augment.unit)
    return Settled(config, precision, reason, decode, compilation, stage, accumulation)


def check_alone(config: Config, world: World) -> None:
    """Check what every rank can check by itself, in moments: the batch sizes, ``train.compile``, the model's switches and image size,
    whether the optimizer suits it. A :class:`UserError` is the same on every rank.
    """
    if config.train.micro_batch_size == AUTO:
        fitting_micro_batches(config.train, world.size, config.augment.unit)
    else:
        accumulation_steps(config.train, world.size, config.augment.unit)
    choose_compilation(config.train, world)
    with torch.device("meta"):  # costs no memory
        parameter_groups(model_of(config), config.optim)


def choose_decoding(asked: str, begun_with: str | None, world: World, repeatable: bool = False) -> str:
    """Settle ``data.decode`` for training ("gpu", "cpu", or "auto": to be measured), on all ranks alike without communication.

    Args:
        begun_with: that of the run so far, which "auto" keeps; "auto" or None while it is not known.
        repeatable: the run repeats its pixels whenever it is begun: "auto" then is the GPU, because a measurement may differ.

    Raises:
        UserError: it cannot be done here.
    """
    decoding_device(asked, world.device)
    if asked != AUTO or world.device.type == "cpu":
        return asked
    if begun_with not in (GPU, CPU):
        return GPU if repeatable else AUTO
    say(world, f"decoding on the {begun_with.upper()}, as this run has measured before: data.decode=gpu or cpu changes that")
    return begun_with


def choose_compilation(train: TrainConfig, world: World) -> str:
    """Settle ``train.compile`` for this start: "off", "blocks", "model" or "graphs".

    Raises:
        UserError: ZeRO-3, activation checkpointing or the device rule out what the config asks for.
    """
    on_gpu, hooked = world.device.type == "cuda", train.zero_stage >= _HOOKED_STAGE and world.size > 1
    if train.compile == AUTO:
        return BLOCKS if on_gpu and not hooked else OFF
    if train.compile == OFF:
        return OFF
    if hooked:
        raise UserError(
            f"train.compile={train.compile} requires train.zero_stage 0, 1 or 2, got {train.zero_stage}, whose hooks on every "
            f"submodule cannot be compiled",
            "set train.compile=auto, or another train.zero_stage",
        )
    if train.compile == GRAPHS and not on_gpu:
        raise UserError(
            f"train.compile={GRAPHS} requires a CUDA GPU, got {world.device.type}", "set train.compile to auto or model"
        )
    if train.compile == GRAPHS and train.activation_checkpointing:
        raise UserError(
            f"train.compile={GRAPHS} requires train.activation_checkpointing=false, got true, which runs blocks again in the "
            f"backward pass: a graph of the forward pass does not hold them",
            "set train.compile to blocks or model, or train.activation_checkpointing to false",
        )
    return train.compile
