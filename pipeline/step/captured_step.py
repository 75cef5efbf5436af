"""Capture a whole training step as one CUDA graph: forward and backward pass, the sums over the ranks, clipping, AdamW, averages.

The CPU then copies a micro-batch to where the graph reads it, sets the learning rate, launches the graph, and copies the loss and the
gradient norm from where it writes them; it waits for nothing. The kernels are those of a step without a graph, in the same order.

What a graph holds is fixed when it is captured: shapes, addresses, and all that Python has decided. So nothing of a step may be decided
on the host (:func:`what_hinders`), and all that outlives a step must be in memory before: the first step of a start is taken without a
graph, which also compiles kernels, connects NCCL, and makes the optimizer's state. Capturing launches nothing and changes nothing.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from pipeline.loader.loader import Batch
from pipeline.metrics import record, recording
from pipeline.optim.plain_engine import PlainEngine
from pipeline.step.train_step import TrainState, compute_step, sample_noise


def what_hinders(state: TrainState) -> str | None:
    """Why steps cannot be captured, for the log; None: they can."""
    engine = state.engine
    if not isinstance(engine, PlainEngine):
        return "DeepSpeed's engine decides on the host"
    if engine.gradient_accumulation_steps() > 1:
        return "a step has several micro-batches"
    if not engine.capturable:
        return "the optimizer decides on the host"
    if state.objective.teacher:
        return "a teacher is not captured"
    if engine.module.draws_from_generator:
        return "the model draws from PyTorch's generator"
    return None


class CapturedStep:
    """A step as a graph, called as :func:`~pipeline.step.train_step.compute_step`.

    It has the memory that a step takes besides what outlives it, for as long as it exists. It must not exist any more when process
    groups are destroyed: NCCL waits for the graphs that have its kernels. Raises Exception: of any kind, from PyTorch or CUDA:
    something in the step cannot be captured. The state is as before.

    Args:
        state: of which a step was taken.
        batch: like all that follow, in shape, type and layout.
        seed: any, for noise of the right shape.
    """

    def __init__(self, state: TrainState, batch: Batch, seed: int) -> None:
        noise = sample_noise(state.engine.module, batch, seed)
        self._inputs = [given.clone() for given in _inputs(batch, noise)]
        images, labels, other_labels, weight, *noises = self._inputs
        static = replace(batch, images=images, labels=labels, other_labels=other_labels, weight=weight)
        try:
            self._graph = torch.cuda.CUDAGraph()
            # The first of these gives the stream back if capturing fails, too.
            with torch.cuda.stream(torch.cuda.current_stream()), recording() as recorded:
                # The loader's threads go on: they allocate memory and wait for events, which "global" would forbid.
                with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                    (loss,), norm = compute_step(state, lambda: (static, noises[0] if noises else None))
                    self._recorded = list(recorded.items())
                    tensors = [value for _, metric in self._recorded for value in metric.values if isinstance(value, Tensor)]
                    self._found = torch.stack([loss, norm, *(value.float() for value in tensors)])  # type: ignore[list-item]
        except BaseException as error:
            state.engine.break_off()  # type: ignore[attr-defined]  # of PlainEngine
            raise error.__context__ or error from None  # the first one: that the capture has failed says nothing

    def __call__(
        self, micro_batch: Callable[[], tuple[Batch, Tensor | None]], before_update: Callable[[], None] | None = None
    ) -> tuple[list[Tensor], Tensor]:
        for static, given in zip(self._inputs, _inputs(*micro_batch())):
            static.copy_(given)
        self._graph.replay()
        loss, norm, *found = self._found.clone().unbind()  # the next step writes there
        for name, metric in self._recorded:
            for value in metric.values:
                record(name, found.pop(0) if isinstance(value, Tensor) else value, metric.reduce)
        if before_update:
            before_update()
        return [loss], norm


def _inputs(batch: Batch, noise: Tensor | None) -> list[Tensor]:
    """What a step takes of a micro-batch."""
    return [batch.images, batch.labels, batch.other_labels, batch.weight, *([] if noise is None else [noise])]
