"""``train.deterministic``: every sum in a fixed order, so that a resume on GPUs is bit for bit too."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pipeline.errors import UserError

# cuBLAS gives each stream a workspace of its own, of eight buffers of 4 MiB, in place of one whose use depends on timing; PyTorch
# refuses matrix products without it (docs.nvidia.com/cuda/cublas, "Results reproducibility").
_CUBLAS = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
_REFUSAL = re.compile(r"(\S+) does not have a deterministic implementation")  # of torch.use_deterministic_algorithms


def make_deterministic() -> None:
    """Let PyTorch, cuDNN and NCCL use deterministic algorithms only. Call before CUDA starts and before the first process group.

    Strictly, without ``warn_only``: attention's memory-efficient backward pass adds in a fixed order only then, and NCCL leaves
    out NVLS, whose sums have no fixed order.
    """
    os.environ.setdefault(*_CUBLAS)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False  # it may choose another algorithm in every start
    # It would fill every new tensor with NaN: for programs that read memory before they write it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a property of the module


@contextmanager
def refusals_explained() -> Iterator[None]:
    """An operation without deterministic form is the user's to decide on.

    Raises:
        UserError: the block met one.
    """
    try:
        yield
    except RuntimeError as error:
        if not torch.are_deterministic_algorithms_enabled() or not (refused := _REFUSAL.search(str(error))):
            raise
        raise UserError(
            f"train.deterministic is true, but {refused[1]}, which the model uses, has no deterministic form on this device, one needed",
            "set train.deterministic=false, or train on CPUs",
        ) from None
