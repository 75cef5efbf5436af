"""Trace a training step and an evaluation on tensors without values: what is in memory when most is, and what the device runs."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeline.config import Config
from pipeline.errors import UserError, first_line
from pipeline.inference.teacher import library_network
from pipeline.inference.trained import read_trained
from pipeline.models import list_models, model_of
from pipeline.models.common.base import VisionModel
from pipeline.models.common.layers import keep_fake_tables
from pipeline.optim.engine import weights_cast_once
from pipeline.planning.planned_machine import EngineMemory, Layout, forms_of
from pipeline.planning.trace import PARAMETERS, Operator, Trace
from pipeline.step.loss import Objective, label_loss
from pipeline.step.precision import autocast
from pipeline.step.train_step import forward_backward, random_batch

TEACHER = "teacher"
AVERAGE, SWAPPED = "weight average", "weights kept during an evaluation of the average"
IMAGES, ACTIVATIONS, PHI, BACKWARD = "images", "activations", "Φp", "temporaries of the backward pass"
_CPU = torch.device("cpu")
_EVALUATED_BATCHES = 2  # the second finds what the model keeps from batch to batch


@dataclass(frozen=True)
class TracedStep:
    """A trace."""

    parts: Counter[str]  # bytes by name at the moment at which their sum is largest
    operators: list[Operator]  # of one micro-batch in order, forward and then backward; of an evaluation those of a batch
    teacher: list[Operator]  # operators of its forward pass
    kept: set[int]  # numbers of the memory that is needed after them: gradients and scores
    tensors: int  # parameters that learn
    elements: int  # numbers in them
    state_elements: int  # numbers that the optimizer keeps, over all processes
    optimizer_flops: float  # of the matrix products in its step
    buffers: int  # bytes of the buffers that a checkpoint has


def trace_step(config: Config, layout: Layout) -> TracedStep:
    """Trace one optimizer step, not the first, whose optimizer state is not there yet; of several micro-batches the last, with what the
    others leave. ``config``: with ``train.precision`` and the micro-batch settled. Raises UserError: the model cannot be built, or
    does not run without values."""
    train, side = config.train, config.model.image_size
    teacher, _ = fake_teacher(config)
    taught: list[Operator] = []
    with _fake_run(config, layout) as (model, engine, trace):
        model.train()
        average = trace.new(engine.weights, AVERAGE) if train.ema_decay else None

        def forward(images: Tensor, noise: Tensor | None) -> Tensor:
            with engine.forward(), autocast(_CPU, train.precision):
                scores: Tensor = model(images, noise)
            trace.keep(scores)
            return scores

        def teach(images: Tensor) -> Tensor:
            assert teacher
            begin = len(trace.operators)
            with trace.labelled(TEACHER), torch.no_grad(), autocast(_CPU, train.precision):
                scores: Tensor = teacher(images)
            taught[:], trace.operators[begin:] = trace.operators[begin:], []
            return scores

        def backward(loss: Tensor) -> None:
            # Tensor.backward is itself a call that a mode handles, and modes are off inside of their handlers: activation
            # checkpointing, which calls the model from there, would run other functions.
            ones = torch.ones_like(loss)
            with trace.labelled(BACKWARD), trace.recording(backward=True):
                torch.autograd.Variable._execution_engine.run_backward(
                    (loss,), (ones,), False, False, (), allow_unreachable=True, accumulate_grad=True
                )

        if teacher:
            with trace.labelled(TEACHER):
                teacher = teacher.to_empty(device="cpu").requires_grad_(False)
                teach(torch.empty(1, 3, side, side))  # for its tables
        with weights_cast_once(layout.stage):
            if layout.accumulates:
                engine.accumulate()
            with trace.labelled(IMAGES):
                batch = random_batch(train.micro_batch, config.model, _CPU)
                noise = torch.empty(train.micro_batch, model.noise_per_sample) if model.noise_per_sample else None
            objective = Objective(label_loss(train), teach if teacher else None)
            with trace.labelled(ACTIVATIONS), trace.recording():
                forward_backward(forward, backward, batch, noise, objective)
            engine.after_backward()
        engine.step()
        del average
        return _traced(model, engine, trace, taught)


def trace_evaluation(config: Config, layout: Layout) -> TracedStep:
    """Trace an evaluation between two steps, of the average's weights where there is one; arguments as of :func:`trace_step`."""
    side = config.model.image_size
    with _fake_run(config, layout) as (model, engine, trace), torch.no_grad():
        model.eval()
        copies = [trace.new(engine.weights, label) for label in (AVERAGE, SWAPPED) if config.train.ema_decay]
        for _ in range(_EVALUATED_BATCHES):
            with trace.labelled(IMAGES):
                images = torch.empty(config.eval.batch_size, 3, side, side)
            trace.operators.clear()
            with engine.forward(), trace.labelled(ACTIVATIONS), trace.recording():
                with autocast(_CPU, config.train.precision):
                    scores = model(images)
                scores = scores.float()
            del images, scores
        del copies
        return _traced(model, engine, trace, [])


def _traced(model: nn.Module, engine: EngineMemory, trace: Trace, taught: list[Operator]) -> TracedStep:
    buffers = model.state_dict().keys() - dict(model.named_parameters()).keys()
    return TracedStep(
        parts=+trace.peak,
        operators=trace.operators,
        teacher=taught,
        kept=trace.kept,
        tensors=len(engine.parameters),
        elements=engine.elements,
        state_elements=engine.state_elements,
        optimizer_flops=engine.matrix_flops,
        buffers=sum(model.get_buffer(name).nbytes for name in buffers),
    )


@contextmanager
def _fake_run(config: Config, layout: Layout) -> Iterator[tuple[VisionModel, EngineMemory, Trace]]:
    """The model with fake parameters, what the engine holds, and the record of it all, while tensors are fake."""
    with torch.device("meta"):
        model = model_of(config)
    with keep_fake_tables(), FakeTensorMode(allow_non_fake_inputs=True), Trace() as trace:
        with trace.labelled(PARAMETERS):
            model = model.to_empty(device="cpu")
        with forms_of(trace, model, layout), _phi_labelled(model, trace):
            engine = EngineMemory(trace, model, config, layout)
            try:
                yield model, engine, trace
            except (RuntimeError, NotImplementedError, TypeError) as error:
                if config.model.name in list_models():
                    raise
                reason = f"whose step cannot be planned without values of tensors ({first_line(error)[:200]})"
                remedy = "measure it instead: pipeline.train with train.max_steps=100, then --measured with its output_dir"
                raise UserError(f"model.name is {config.model.name}, {reason}", remedy) from None


def _phi_labelled(model: VisionModel, trace: Trace) -> Any:
    """In the block, give Φp its label; in an evaluation it is computed once, as in a run: the model keeps no fake tensors."""
    compute = model.log_phi
    kept: list[Tensor | None] = []

    def log_phi(grid: tuple[int, int]) -> list[Tensor | None]:
        with trace.labelled(PHI):
            maps = kept or compute(grid)
        if not model.training:
            kept[:] = maps
        return maps

    return patch.object(model, "log_phi", log_phi)


def fake_teacher(config: Config) -> tuple[nn.Module | None, str]:
    """Build the network that teaches (``train.teacher``), in eval mode on PyTorch's meta device. Returns None if there is none,
    or if it is not at hand; and in the latter case a sentence that says why."""
    train, missing = config.train, "the teacher is not in the figures:"
    if not train.teacher:
        return None, ""
    try:
        trained = None if train.teacher_weights else _trained_config(train.teacher)
        with torch.device("meta"):
            return (model_of(trained) if trained else library_network(config)[0]).eval(), ""
    except UserError as error:
        return None, f"{missing} {error}"
    except Exception as error:  # of the library's own code
        return None, f"{missing} {train.teacher} cannot be built ({first_line(error)})"


@lru_cache(maxsize=8)
def _trained_config(source: str) -> Config:
    return read_trained(Path(source)).config
