"""The choice of precision: bf16 where all devices have instructions for it, else fp32."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config import AUTO, Config
from pipeline.distributed.world import World
from pipeline.hardware import native_bf16
from pipeline.step.forward import BF16, FP32

# Emulated bf16 against fp32: measured on a CPU with AVX2 only, training steps of PerViT-T with batches of 4 and 16.
_SLOWDOWN = "11 to 17 times"


@dataclass(frozen=True)
class Precision:
    """The chosen precision and the reason."""

    name: str  # "bf16" or "fp32"
    reason: str
    warning: str | None = None  # one sentence, if the choice makes the run slow

    def __str__(self) -> str:
        return f"precision {self.name}: {self.reason}"


def choose_precision(asked: str, begun_with: str | None, world: World) -> Precision:
    """Settle ``train.precision`` for all ranks alike. Collective.

    Args:
        asked: "auto", "bf16" or "fp32".
        begun_with: the precision of the run so far, which "auto" keeps; None for a new run.
        world: all ranks; one without bf16 instructions decides for all.
    """
    everywhere, why = native_on_all(world)
    fitting = BF16 if everywhere else FP32
    if asked != AUTO:
        chosen, reason = asked, "train.precision asks for it"
    elif begun_with is None or begun_with == fitting:
        chosen, reason = fitting, f"train.precision=auto, {why}"
    else:
        chosen, reason = begun_with, f"the run was begun with it; a new one would take {fitting} here ({why})"
    warning = None
    if chosen == BF16 and not everywhere:
        warning = (
            f"train.precision is bf16, but {why}: it is emulated, and a training step takes {_SLOWDOWN} as long as in fp32; "
            f"begin a new run with train.precision=auto or fp32."
        )
    return Precision(chosen, reason, warning)


def choose_evaluation_precision(trained_in: str, asked: str, world: World) -> Precision:
    """The precision to evaluate a trained model in. Collective.

    Args:
        trained_in: "bf16" or "fp32".
        asked: "auto", which keeps the training's unless it would be emulated; "bf16" or "fp32".
        world: all ranks.
    """
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


def with_precision(config: Config, name: str) -> Config:
    """The config with ``train.precision`` settled."""
    return config.model_copy(update={"train": config.train.model_copy(update={"precision": name})})
