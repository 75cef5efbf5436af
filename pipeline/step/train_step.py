"""Take a training step: forward and backward passes of its micro-batches, then the optimizer, the weight average and BatchNorm."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.augment import BatchRequest
from pipeline.augment.crop import eval_geometry
from pipeline.config import ModelConfig
from pipeline.loader.device_stream import upload
from pipeline.loader.loader import Batch
from pipeline.metrics import record
from pipeline.models.common.base import VisionModel
from pipeline.optim.averages import StepStatistics, WeightAverage
from pipeline.optim.engine import Engine, PlainEngine, micro_batches, optimizer_step, set_learning_rate, was_taken
from pipeline.step.loss import Objective
from pipeline.stream.philox import Stream, random_words, uniforms

_BELOW_ONE = np.float32(1 - 2.0**-24)  # the largest float32 in [0, 1)


@dataclass
class TrainState:
    """What is trained; the engine has the model and its optimizer."""

    engine: Engine[VisionModel]
    batchnorm: StepStatistics
    ema: WeightAverage | None
    objective: Objective
    captured: Callable[..., tuple[list[Tensor], float | Tensor]] | None = None  # :func:`compute_step` of it as a CUDA graph


class Answer:
    """Whether the step with a gradient norm, (), was taken, which a GPU may know only later."""

    def __init__(self, norm: Tensor | float) -> None:
        self._norm, self._done = norm, None
        self.late = isinstance(norm, Tensor) and norm.is_cuda  # to ask now would wait for the GPU
        if isinstance(norm, Tensor) and self.late:
            self._norm = norm.to("cpu", non_blocking=True)  # into pinned memory
            self._done = torch.cuda.current_stream(norm.device).record_event()

    def __bool__(self) -> bool:
        if self._done and not self._done.query():
            self._done.synchronize()
        return bool(was_taken(self._norm))


@dataclass(frozen=True)
class StepResult:
    """What a step has found."""

    requests: list[BatchRequest]  # of this rank's micro-batches
    losses: list[Tensor]  # of the same, () each
    batch: Batch  # the last micro-batch
    grad_norm: float | Tensor  # over all ranks, before clipping; not finite if the step was skipped
    taken: Answer  # whether the step changed weights and statistics, the same on all ranks

    @property
    def loss(self) -> Tensor:
        """(), the mean of this rank's micro-batches."""
        return torch.stack(self.losses).mean()


def train_step(
    state: TrainState,
    next_batch: Callable[[], Batch],
    lr: float,
    seed: int,
    before_forward: Callable[[Batch, Tensor | None], None] | None = None,
    before_update: Callable[[], None] | None = None,
    count: int | None = None,
) -> StepResult:
    """Take one optimizer step; a gradient that is not finite changes nothing, on any rank. Collective.

    Args:
        state: with its engine in training mode.
        seed: of the run, for :func:`sample_noise`.
        before_forward: called with each micro-batch and its noise.
        before_update: called when all passes are under way, before anything of the step is decided; all of a captured step is then.
        count: end the step after so many micro-batches; None: after those of the config.
    """
    requests, last = list[BatchRequest](), list[Batch]()
    set_learning_rate(state.engine, lr)

    def micro_batch() -> tuple[Batch, Tensor | None]:
        asked = time.perf_counter()
        last[:] = [next_batch()]
        record("data_wait", time.perf_counter() - asked, reduce="slowest")
        record("replaced", last[0].replaced, reduce="sum")
        requests.append(last[0].request)
        noise = sample_noise(state.engine.module, last[0], seed)
        if isinstance(state.engine, PlainEngine):
            state.engine.prepare(last[0].images, noise)  # does nothing after the first micro-batch of a start
        if before_forward:
            before_forward(last[0], noise)
        return last[0], noise

    compute = state.captured or partial(compute_step, state, count=count)
    losses, grad_norm = compute(micro_batch, before_update)
    result = StepResult(requests, losses, last[0], grad_norm, Answer(grad_norm))
    record("loss", result.loss)
    record("lr", lr, reduce="max")
    record("grad_norm", grad_norm, reduce="max")
    return result


def compute_step(
    state: TrainState,
    micro_batch: Callable[[], tuple[Batch, Tensor | None]],
    before_update: Callable[[], None] | None = None,
    count: int | None = None,
) -> tuple[list[Tensor], float | Tensor]:
    """Compute a step: what of :func:`train_step`, with its arguments, a CUDA graph can hold. Collective. ``micro_batch``: gives
    the next one, and its noise. Returns the losses of its micro-batches, () each, and the gradient norm."""
    engine, losses = state.engine, []
    state.batchnorm.begin()
    for number in micro_batches(engine, count):
        batch, noise = micro_batch()
        state.batchnorm.micro_batch(number)
        losses.append(forward_backward(engine, engine.backward, batch, noise, state.objective))
        if not engine.is_gradient_accumulation_boundary():
            engine.step()
    if before_update:
        before_update()
    grad_norm = optimizer_step(engine)
    assert grad_norm is not None  # the last micro-batch completes the step
    taken = was_taken(grad_norm)
    state.batchnorm.end(taken)
    if state.ema:
        state.ema.update(taken)
    return losses, grad_norm


def forward_backward(
    forward: Callable[[Tensor, Tensor | None], Tensor],
    backward: Callable[[Tensor], Any],
    batch: Batch,
    noise: Tensor | None,
    objective: Objective,
) -> Tensor:
    """Run the forward pass of a micro-batch, its loss and its backward pass; returns the loss without its graph, () float32.

    Args:
        forward: images (B, 3, H, W) and noise -> scores (B, classes); the engine, or a model under autocast.
        backward: computes the gradients of a loss, ().
        noise: what the model takes besides: (B, noise_per_sample), or None.
    """
    loss = objective(forward(batch.images, noise), batch)
    # A loss that is not finite gets a NaN gradient, which all ranks see in the gradient norm without another collective.
    backward(loss * torch.where(loss.isfinite(), 1.0, torch.nan))
    return loss.detach()


def sample_noise(model: VisionModel, batch: Batch, seed: int) -> Tensor | None:
    """The uniform numbers that the model may draw for each image (stochastic depth), a function of its place in the stream.

    A model that also draws from PyTorch's generator (timm's dropout) is told what to seed it with. Returns
    (B, noise_per_sample) float32 on the batch's device, or None when the model draws none.
    """
    count = model.noise_per_sample
    if model.draws_from_generator:
        # Below 2**63: the words of the first image that follow those for stochastic depth. Its place belongs to one step,
        # micro-batch and rank, and differs between them.
        first = (batch.request.epoch[:1], batch.request.position[:1])
        low, high = random_words(Stream.STOCHASTIC_DEPTH, seed, *first, count + 2)[0, count:].tolist()
        model.generator_seed = low | (high & 0x7FFFFFFF) << 32
    if count == 0:
        return None
    noise = uniforms(Stream.STOCHASTIC_DEPTH, seed, batch.request.epoch, batch.request.position, count).astype(np.float32)
    noise = np.minimum(noise, _BELOW_ONE)  # rounding must not make a 1 of it
    return upload([noise], batch.images.device)[0]


def random_batch(size: int, model: ModelConfig, device: torch.device) -> Batch:
    """A micro-batch of ``size`` random images: everything that a step takes of a batch, without data."""
    side = model.image_size
    images = torch.randn(size, 3, side, side, device=device)
    labels = torch.arange(size, device=device) % model.num_classes
    numbers = np.arange(size, dtype=np.int64)
    sides = np.full(size, side)
    geometry = eval_geometry(sides, sides, side, 1.0)
    request = BatchRequest(numbers, numbers, np.zeros_like(numbers), numbers, np.ones(size, dtype=bool), geometry)
    weight = torch.ones(size, device=device)
    return Batch(images, labels, labels.clone(), weight, weight > 0, request, 0)
