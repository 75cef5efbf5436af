"""Settle what a config leaves open, once for a start; build the parts of a run: the model in its engine, its teacher, the loader.

Precision, ZeRO stage, decoding, compiling and the size of a micro-batch are chosen here: what a start builds, logs and records comes from the
:class:`Settled` that it gets.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from pipeline.augment import active
from pipeline.checkpoint import loading
from pipeline.checkpoint.loading import Verified
from pipeline.checkpoint.manifest import RunState
from pipeline.checkpoint.weights import read_initial_weights
from pipeline.cluster.agreement import do_in_main, do_on_all
from pipeline.cluster.world import World
from pipeline.config import AUTO, Config, accumulation_steps, fitting_micro_batches
from pipeline.errors import UserError, first_line
from pipeline.inference.teacher import describe_teacher, load_teacher
from pipeline.loader.batches import TrainBatches
from pipeline.loader.loader import CPU, GPU, Loader, decoding_device
from pipeline.loader.probe import usable_decoding
from pipeline.loader.reader import BadSamples
from pipeline.loader.trial import AnyLoader, SizedLoader, TrialLoader, Turns
from pipeline.logs import pictures
from pipeline.logs.console import say_once
from pipeline.models import flops, load_pretrained, model_of
from pipeline.models.common.base import VisionModel
from pipeline.models.timm.names import is_timm, weights_folder
from pipeline.optim.averages import StepStatistics, WeightAverage
from pipeline.optim.build import describe, parameter_groups
from pipeline.optim.engine import build_engine, choose_zero_stage
from pipeline.planning.memory import trained_parameters
from pipeline.shards.mixed_set import MixedSet
from pipeline.shards.shard_set import ShardSet
from pipeline.step.loss import Objective, label_loss
from pipeline.step.precision import Precision, choose_precision
from pipeline.step.train_step import TrainState
from pipeline.training.compiling import GRAPHS, OFF
from pipeline.training.micro_batch import choose_micro_batch


@dataclass(frozen=True)
class Settled:
    """A start's config with nothing left open, and the reasons."""

    config: Config  # as the run records it: train.precision, train.micro_batch_size and train.zero_stage are settled
    precision: Precision
    micro_batch_reason: str | None  # None: the config states the size
    decode: str  # "gpu", "cpu", or "auto": measured in the first batches
    form: str  # in which a GPU decodes: "regions" or "whole" images
    compile: str  # "off", "blocks", "model" or "graphs"
    zero_stage: int  # that the engine takes; 0 for one process
    zero_stage_reason: str  # why not that of the config; else empty
    accumulation: int  # micro-batches of a rank per optimizer step


def settle(config: Config, before: RunState | None, shards: ShardSet | MixedSet, world: World) -> Settled:
    """Settle a config, which :func:`check_alone` has accepted, for all ranks alike; ``auto`` follows ``before``, the checkpoint that
    this start resumes from. A GPU that is to decode is given some images of ``shards`` first. Collective. Raises UserError: on every
    rank: images cannot be decoded as asked, or no micro-batch fits."""
    recorded = before.config if before else {"train": {}, "data": {}}
    precision = choose_precision(config.train.precision, recorded["train"].get("precision"), world)
    decode = choose_decoding(config.data.decode, recorded["data"].get("decode"), world, config.train.deterministic)
    decode, form = usable_decoding(decode, shards, world)
    memory = torch.cuda.get_device_properties(world.device).total_memory if world.device.type == "cuda" else None
    memory = min((found for found in world.gather(memory) if found), default=None)
    stage, why = choose_zero_stage(config, world.size, partial(trained_parameters, config), memory)
    config = config.with_values({"train.precision": precision.name})
    if config.train.zero_stage == AUTO:
        config = config.with_values({"train.zero_stage": stage})
    size, reason = choose_micro_batch(config, recorded["train"].get("micro_batch_size"), world)
    config = config.with_values({"train.micro_batch_size": size})
    compilation = choose_compilation(config, world)
    accumulation = accumulation_steps(config.train, world.size, config.augment.unit)
    return Settled(config, precision, reason, decode, form, compilation, stage, why, accumulation)


def check_alone(config: Config, world: World) -> None:
    """Check what every rank can check by itself, in moments: the batch sizes, ``train.compile``, the model's switches and image size,
    whether the optimizer suits it. A :class:`UserError` is the same on every rank."""
    if config.train.micro_batch_size == AUTO:
        fitting_micro_batches(config.train, world.size, config.augment.unit)
    else:
        accumulation_steps(config.train, world.size, config.augment.unit)
    choose_compilation(config, world)
    active(config.augment, config.data, config.model.image_size)
    with torch.device("meta"):  # costs no memory
        model = model_of(config)
        parameter_groups(model, config.optim)
        for _, side in config.data.size_schedule:
            try:
                model.eval()(torch.empty(1, 3, side, side))
            except (UserError, AssertionError) as error:  # the latter is timm's
                problem = f"data.size_schedule requires a model that takes {side} pixels: {first_line(error)}"
                raise UserError(problem, "choose other sides or another model") from None
            except RuntimeError:
                pass  # the sides were checked before: what is not implemented on this device


def choose_decoding(asked: str, begun_with: str | None, world: World, repeatable: bool = False) -> str:
    """Settle ``data.decode`` for training ("gpu", "cpu", or "auto": to be measured), on all ranks alike without communication. "auto"
    keeps what the run was ``begun_with``, if that is known; else it is the GPU for a run that is to be ``repeatable``, pixel by pixel,
    because a measurement may differ. Raises UserError: it cannot be done here."""
    decoding_device(asked, world.device)
    if asked != AUTO or world.device.type == "cpu":
        return asked
    if begun_with not in (GPU, CPU):
        return GPU if repeatable else AUTO
    say_once(world, f"decoding on the {begun_with.upper()}, as this run has done before: data.decode=gpu or cpu changes that")
    return begun_with


def choose_compilation(config: Config, world: World) -> str:
    """Settle ``train.compile`` for this start: "off", "blocks", "model" or "graphs". Raises UserError: ZeRO-3, activation
    checkpointing or the device rule out what the config asks for."""
    train, on_gpu = config.train, world.device.type == "cuda"
    if train.compile in (AUTO, OFF):
        return config.compilation(world.size, train.zero_stage, on_gpu)
    if train.zero_stage == 3 and world.size > 1:
        got = f"got {train.zero_stage}, whose hooks on every submodule cannot be compiled"
        problem = f"train.compile={train.compile} requires train.zero_stage 0, 1 or 2, {got}"
        raise UserError(problem, "set train.compile=auto, or another train.zero_stage")
    if train.compile == GRAPHS and not on_gpu:
        problem = f"train.compile={GRAPHS} requires a CUDA GPU, got {world.device.type}"
        raise UserError(problem, "set train.compile to auto or model")
    if train.compile == GRAPHS and train.activation_checkpointing:
        got = "got true, which runs blocks again in the backward pass: a graph of the forward pass does not hold them"
        problem = f"train.compile={GRAPHS} requires train.activation_checkpointing=false, {got}"
        raise UserError(problem, "set train.compile to blocks or model, or train.activation_checkpointing to false")
    return train.compile


def build_model(config: Config, world: World, classes: list[str], fresh: bool) -> VisionModel:
    """The run's model with its first weights: from the seed, or if it is ``fresh``, so that no checkpoint replaces them, from
    ``train.init_from``. ``classes``: of the training set, by index. Raises UserError: ``train.init_from`` cannot be read or
    does not fit."""
    torch.manual_seed(config.seed)
    model = model_of(config)
    if config.train.freeze:
        learning = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        say_once(world, f"freeze: {learning:,} of {sum(p.numel() for p in model.parameters()):,} parameters learn")
    if (place := config.train.init_from) and fresh:
        if of_timm := is_timm(place):  # one rank downloads; the others find it in the cache, or are on another node
            do_in_main(lambda: weights_folder(place), world)
        initial = do_on_all(lambda: read_initial_weights(weights_folder(place) if of_timm else Path(place)), world)
        said = load_pretrained(model, initial.weights, f"train.init_from {place}", initial.classes, classes)
        for sentence in (f"{initial.what} of {place}", *said):
            say_once(world, f"init_from: {sentence}")
    return model


def build(
    settled: Settled, world: World, classes: list[str], verified: Verified | None
) -> tuple[TrainState, flops.FlopRow, Tensor | None]:
    """Build the model of a start's config in its engine, with first weights or those of the checkpoint. Collective. Returns
    what is trained; the model's cost; and on rank 0 of a new run its peripheral attention before the first step. Raises
    UserError: weights or a teacher cannot be read or do not fit."""
    config, fresh = settled.config, verified is None
    say_once(world, f"building {config.model.name}")
    count = (config.model.name, config.model.image_size, config.model.num_classes, config.model.arguments)
    counted = world.from_main(asdict(flops.count(*count)) if world.is_main else None)  # before ZeRO-3 patches F.linear
    model = build_model(config, world, classes, fresh)
    first_maps = None
    if world.is_main and fresh:  # before ZeRO-3 has the weights
        first_maps = pictures.peripheral_maps(model.eval(), config.model.image_size)
        model.train()
    teacher = None
    if config.train.teacher:  # a run that was begun keeps its teacher
        say_once(world, f"loading the teacher: {describe_teacher(config.train)}")
        teacher = load_teacher(config, world.device, classes if fresh else None)
    why = f" ({settled.zero_stage_reason})" if settled.zero_stage_reason else ""
    owner = "DeepSpeed's" if settled.zero_stage else "the"
    said = f"building the optimizer, {describe(model, config.optim)}, and {owner} engine"
    say_once(world, f"{said}, ZeRO stage {settled.zero_stage}{why}")
    engine = build_engine(model, config, world)
    ema = WeightAverage(engine, config.train.ema_decay) if config.train.ema_decay else None
    if verified:
        loading.load(engine, verified, ema, world)
    train_state = TrainState(engine, StepStatistics(engine.module, world), ema, Objective(label_loss(config.train), teacher))
    return train_state, flops.FlopRow(**counted), first_maps


def training_loader(
    shards: ShardSet | MixedSet, settled: Settled, world: World, first_step: int, model: VisionModel
) -> SizedLoader:
    """This process's micro-batches of a settled run, as the ``model`` takes them, from the first one after ``first_step`` steps on."""
    config, layout = settled.config, model.image_format
    image_format = torch.float32, torch.contiguous_format
    # The bits of autocast's own cast. A teacher may compute with the images before they meet a convolution.
    if layout and world.device.type == "cuda" and config.train.precision == "bf16" and not config.train.teacher:
        image_format = torch.bfloat16, layout
    batches = TrainBatches.of_run(shards, config, world.rank, world.size)

    def open_loader(batches: TrainBatches, start: int, before: AnyLoader | None) -> AnyLoader:
        decode = before.decode if before else settled.decode
        bad = before.bad if before else BadSamples(shards, config.data.max_bad_samples)
        rest = world.device, world.cpu_threads

        def opened(start: int | Iterator[int], decode: str, bad: BadSamples) -> Loader[TrainBatches]:
            return Loader(batches, config.data, *rest, start, bad, decode, settled.form, image_format)

        if decode != AUTO or world.device.type == "cpu":
            return opened(start, decode, bad)
        turns = Turns.of_steps(start, config.data.prefetch, batches.batches_per_step)
        tried = f"decoding on the GPU and on the CPU in turns for {turns.total} micro-batches, to keep the faster"
        say_once(world, f"{tried}: data.decode=gpu or cpu settles it")
        return TrialLoader(batches, turns, bad, opened, partial(keep_faster, world))

    return SizedLoader(batches, first_step * batches.batches_per_step, open_loader)


def keep_faster(world: World, seconds: dict[str, float]) -> str:
    """The ``data.decode`` with which the slowest rank is faster, by the ``seconds`` of a micro-batch on this rank. Collective."""
    of_ranks = world.gather(seconds)
    slowest = {decode: max(rank[decode] for rank in of_ranks) for decode in (GPU, CPU)}
    kept, other = sorted(slowest, key=lambda decode: slowest[decode])
    took = f"{1e3 * slowest[kept]:.1f} ms, and {1e3 * slowest[other]:.1f} ms with the {other.upper()} decoding"
    say_once(world, f"decoding on the {kept.upper()} from now on: a micro-batch takes {took}")
    return kept
