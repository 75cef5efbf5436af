"""What is used of DeepSpeed's engine."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

WrappedModel = TypeVar("WrappedModel", bound=nn.Module, covariant=True)


class Engine(Protocol[WrappedModel]):
    """What is used of ``deepspeed.DeepSpeedEngine``, which has no types: the whole dependence on DeepSpeed's interface.

    Parameters under ZeRO-3 have more attributes (``ds_tensor``, ``ds_shape``); :mod:`pipeline.optim.slices` reads those, and the
    flat shards of the optimizer.
    """

    clip_grad_norm: float  # ours, for ZeRO 0: see :func:`deepspeed_config`
    enable_backward_allreduce: bool

    @property
    def module(self) -> WrappedModel:
        """The model itself."""

    @property
    def optimizer(self) -> Any:
        """PyTorch's optimizer under ZeRO 0, else DeepSpeed's around it, another class for each stage."""

    def __call__(self, images: Tensor, noise: Tensor | None = ...) -> Tensor:
        """The model's forward pass, with autocast where the config says so."""

    def backward(self, loss: Tensor) -> Any:
        """Accumulate the gradients of a micro-batch and reduce them over ranks. Collective."""

    def step(self) -> None:
        """End a micro-batch; after the last one of a step, take the step. Collective."""

    def zero_grad(self) -> None: ...

    def train(self, mode: bool = ...) -> Any: ...

    def eval(self) -> Any: ...

    def gradient_accumulation_steps(self) -> int: ...

    def is_gradient_accumulation_boundary(self) -> bool: ...

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the next micro-batch is the last one of a step, in place of counting them."""

    def was_step_applied(self) -> bool: ...

    def get_global_grad_norm(self) -> float | Tensor | None: ...

    def zero_optimization_stage(self) -> int: ...

    def empty_partition_cache(self) -> None:
        """ZeRO-3: release gathered parameters."""
