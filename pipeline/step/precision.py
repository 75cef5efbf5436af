"""Choose the precision, bf16 where all devices have instructions for it, else fp32; let sums be added in a fixed order."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from pipeline.cluster.world import World
from pipeline.config import AUTO
from pipeline.errors import UserError
from pipeline.hardware import native_bf16

BF16, FP32 = "bf16", "fp32"
# Emulated bf16 against fp32: measured on a CPU with AVX2 only, training steps of PerViT-T with batches of 4 and 16.
_SLOWDOWN = "11 to 17 times"
# cuBLAS gives each stream a workspace of its own, of eight buffers of 4 MiB, instead of one whose use depends on timing; PyTorch
# refuses matrix products without it (docs.nvidia.com/cuda/cublas, "Results reproducibility").
_CUBLAS = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
_REFUSAL = re.compile(r"(\S+) does not have a deterministic implementation")  # of torch.use_deterministic_algorithms


@dataclass(frozen=True)
class Precision:
    """The chosen precision and the reason."""

    name: str  # "bf16" or "fp32"
    reason: str
    warning: str | None = None  # one sentence, if the choice makes the run slow

    def __str__(self) -> str:
        return f"precision {self.name}: {self.reason}"


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The context in which a forward pass computes in ``precision``, "bf16" or "fp32"; called with a function: that in it."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == BF16)


def choose_precision(asked: str, begun_with: str | None, world: World) -> Precision:
    """Settle ``train.precision`` for all ranks alike: one without bf16 instructions decides for all. Collective.
    ``begun_with``: the precision of the run so far, which "auto" keeps; None for a new run."""
    everywhere, why = native_on_all(world)
    fitting = BF16 if everywhere else FP32
    if asked != AUTO:
        chosen, reason = asked, "train.precision asks for it"
    elif begun_with is None or begun_with == fitting:
        chosen, reason = fitting, f"train.precision=auto, {why}"
    else:
        chosen, reason = begun_with, f"the run was started with it; a new one would take {fitting} here ({why})"
    warning = None
    if chosen == BF16 and not everywhere:
        slow = f"it is emulated, and a training step takes {_SLOWDOWN} as long as in fp32"
        warning = f"train.precision is bf16, but {why}: {slow}; begin a new run with train.precision=auto or fp32."
    return Precision(chosen, reason, warning)


def choose_evaluation_precision(trained_in: str, asked: str, world: World) -> Precision:
    """The precision to evaluate a trained model in. Collective. ``asked``: "auto", which keeps the training's unless it would
    be emulated; "bf16" or "fp32"."""
    everywhere, why = native_on_all(world)
    if asked != AUTO:
        return Precision(asked, "as asked for")
    if trained_in == BF16 and not everywhere:
        return Precision(FP32, f"trained in bf16, but {why}")
    return Precision(trained_in, "as in training")


def native_on_all(world: World) -> tuple[bool, str]:
    """:func:`native_bf16` on all ranks; the reason is that of the first without. Collective."""
    answers = world.gather(list(native_bf16(world.device)))  # of every rank: [whether, why]
    lacking = [(rank, why) for rank, (native, why) in enumerate(answers) if not native]
    if not lacking:
        return True, answers[0][1]
    rank, why = lacking[0]
    return False, why if len(lacking) == world.size else f"rank {rank} of {world.size}: {why}"


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
    """Turn PyTorch's refusal of an operation without deterministic form into a UserError."""
    try:
        yield
    except RuntimeError as error:
        if not torch.are_deterministic_algorithms_enabled() or not (refused := _REFUSAL.search(str(error))):
            raise
        form = f"a deterministic form of {refused[1]}, which the model uses, got none on this device"
        remedy = "set train.deterministic=false, or train on CPUs"
        raise UserError(f"train.deterministic=true requires {form}", remedy) from None
