"""A training step with fake tensors: what is in memory when most is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from pipeline.config import Config
from pipeline.models import model_of
from pipeline.models.common.base import VisionModel
from pipeline.planning.engine_memory import EngineMemory, engine_memory
from pipeline.planning.gpu_forms import as_on_gpu
from pipeline.planning.live_memory import PARAMETERS, LiveMemory
from pipeline.planning.teacher import fake_teacher

TEACHER = "teacher"
AVERAGE, IMAGES, ACTIVATIONS, PHI, BACKWARD = (
    "weight average",
    "images",
    "activations",
    "Φp",
    "temporaries of the backward pass",
)


def step_memory(config: Config, world_size: int, stage: int, accumulation: int, on_gpu: bool, kernels: bool) -> Counter[str]:
    """Trace one optimizer step, not the first, whose moments are not there yet.

    Args:
        config: with ``train.precision`` bf16 or fp32.
        world_size: number of processes.
        stage: of ZeRO that the run takes.
        accumulation: micro-batches per step; the last is traced, with what the others leave.
        on_gpu: operators as on a GPU, else as on a CPU.
        kernels: the Triton kernels run there.

    Returns:
        Bytes by part at the moment at which their sum is largest.
    """
    train, shape = config.train, config.model
    teacher, _ = fake_teacher(config)
    with fake_run(config, world_size, stage, on_gpu, kernels) as (model, engine, live):
        model.train()
        average = live.new(held_weights(model, world_size, stage), AVERAGE) if train.ema_decay else None
        if teacher:
            with live.labelled(TEACHER):
                teacher = teacher.to_empty(device="cpu").requires_grad_(False)
                _decisions(teacher, torch.empty(1, 3, shape.image_size, shape.image_size), train.precision)  # for its tables
        with _weights_cast_once(stage, train.precision == "bf16"):
            if accumulation > 1:
                engine.accumulate()
            with live.labelled(IMAGES):
                images = torch.empty(train.micro_batch, 3, shape.image_size, shape.image_size)
                noise = torch.empty(train.micro_batch, model.noise_per_sample)
            engine.before_forward()
            with live.labelled(ACTIVATIONS):
                scores = scores_of(model, images, noise if model.noise_per_sample else None, train.precision)
                engine.after_forward()
                loss = _loss(scores, train.loss)
                if teacher:
                    with live.labelled(TEACHER):
                        decisions = _decisions(teacher, images, train.precision)
                    loss = loss + F.cross_entropy(scores.float(), decisions)
            with live.labelled(BACKWARD):
                run_backward(loss, torch.ones_like(loss))
            del loss, scores
            engine.after_backward()
        engine.step()
        del average
        return +live.peak


@contextmanager
def fake_run(
    config: Config, world_size: int, stage: int, on_gpu: bool, kernels: bool
) -> Iterator[tuple[VisionModel, EngineMemory, LiveMemory]]:
    """The model with fake parameters, what the engine holds, and the record of it all, while tensors are fake; arguments as of
    :func:`step_memory`."""
    model = fake_free_model(config)
    with FakeTensorMode(allow_non_fake_inputs=True), LiveMemory() as live, ExitStack() as stack:
        with live.labelled(PARAMETERS):
            model = model.to_empty(device="cpu")
        if on_gpu:
            stack.enter_context(as_on_gpu(model, stage, kernels))
        stack.enter_context(_phi_labelled(model, live))
        yield model, engine_memory(live, model, config.optim, world_size, stage, on_gpu), live


def fake_free_model(config: Config) -> VisionModel:
    """The run's model without weights, on PyTorch's meta device."""
    with torch.device("meta"):
        return model_of(config)


def scores_of(model: nn.Module, images: Tensor, noise: Tensor | None, precision: str) -> Tensor:
    """(B, classes)."""
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        return model(images) if noise is None else model(images, noise)


def run_backward(loss: Tensor, ones: Tensor) -> None:
    """``loss.backward()``, which is itself a call that a mode handles, and modes are off inside of their handlers: activation
    checkpointing, which calls the model from there, would then run without autocast."""
    torch.autograd.Variable._execution_engine.run_backward(
        (loss,), (ones,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


@torch.no_grad()
def _decisions(teacher: nn.Module, images: Tensor, precision: str) -> Tensor:
    """(B,), the classes of the teacher (:mod:`pipeline.run.teacher`)."""
    return scores_of(teacher, images, None, precision).argmax(dim=-1)


def _loss(scores: Tensor, name: str) -> Tensor:
    """Of the size of :func:`pipeline.run.loss.mixture_of_two` and of binary cross entropy."""
    if name == "bce":
        return F.binary_cross_entropy_with_logits(scores.float(), torch.empty(scores.shape))
    labels = torch.zeros(len(scores), dtype=torch.long)
    own, other = (F.cross_entropy(scores.float(), labels, label_smoothing=0.1, reduction="none") for _ in range(2))
    return (own + other).mean()


def held_weights(model: nn.Module, world_size: int, stage: int) -> float:
    """Elements of the weights that a process holds between steps, and of a copy of them."""
    return sum(parameter.numel() for parameter in model.parameters()) / (world_size if stage == 3 else 1)


@contextmanager
def _weights_cast_once(stage: int, casts: bool) -> Iterator[None]:
    """:func:`pipeline.optim.engine.micro_batches`: the weights' bf16 copies stay for a whole step, but with ZeRO 3."""
    if stage == 3 or not casts:
        yield
        return
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


@contextmanager
def _phi_labelled(model: VisionModel, live: LiveMemory) -> Iterator[None]:
    if not model.has_phi:
        yield
        return
    compute = model.log_phi

    def labelled(grid: tuple[int, int]) -> list[Tensor | None]:
        with live.labelled(PHI):
            return compute(grid)

    model.log_phi = labelled  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.log_phi
