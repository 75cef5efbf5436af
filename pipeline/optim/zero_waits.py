"""Take the waits for a GPU out of DeepSpeed's ZeRO 1 and 2, at its optimizer's methods and the functions that these call."""

import math
from typing import Any

import torch
from torch import Tensor

from pipeline.cluster.waits import device_waits
from pipeline.optim.slices import skips_on_the_device


def wait_for_the_reduction_only(optimizer: Any) -> None:
    """With ``overlap_comm``, DeepSpeed's ZeRO 1 and 2 wait for the whole device after the last bucket, and so for the loader's
    streams. What follows needs the reduced gradients only: the current stream waits for the reduction's."""
    from deepspeed.accelerator import get_accelerator

    accelerator, epilogue = get_accelerator(), optimizer.independent_gradient_partition_epilogue

    def wait(device: int | None = None) -> None:
        with device_waits():
            accelerator.current_stream().wait_stream(optimizer.reduction_stream)

    def with_stream_wait() -> None:
        accelerator.synchronize = wait  # on the instance, in front of the class's method
        try:
            epilogue()
        finally:
            del accelerator.synchronize

    optimizer.independent_gradient_partition_epilogue = with_stream_wait


def skip_on_the_device(optimizer: Any) -> None:
    """Let the optimizer within skip a step whose norm is not finite, where it can: DeepSpeed would read the norm, once for a step and
    once more for each group that it clips. Its norm is computed without a wait in any case."""
    from deepspeed.runtime.zero import stage_1_and_2 as deepspeed

    if not hasattr(deepspeed, "is_invalid_grad_norm"):  # another version
        return

    def mask(norm: Tensor, device: Any = None, val: float = -1.0) -> None:  # DeepSpeed's copies a tensor from the CPU
        norm.masked_fill_(~torch.isfinite(norm), -1.0)

    deepspeed.mask_nan_or_inf_with_val_inplace = mask
    inner, compute = optimizer.optimizer, optimizer.scaled_global_norm
    if not skips_on_the_device(inner):
        return

    def scaled_global_norm(norm_type: int = 2) -> Tensor:
        norm = compute(norm_type)
        inner.found_inf = 1 - (norm < math.inf).float()
        norm.skipped_on_the_device = True
        return norm

    optimizer.scaled_global_norm = scaled_global_norm
    if not hasattr(deepspeed.is_invalid_grad_norm, "asks"):
        deepspeed.is_invalid_grad_norm = _Judge(deepspeed.is_invalid_grad_norm)


class _Judge:
    """DeepSpeed's ``is_invalid_grad_norm``, for norms that the device judges: never."""

    def __init__(self, asks: Any) -> None:
        self.asks = asks

    def __call__(self, norm: Any) -> bool:
        return not getattr(norm, "skipped_on_the_device", False) and self.asks(norm)
