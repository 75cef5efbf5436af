"""What to change in a run that does not fit into memory, and what each change saves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.planning.memory import Memory, changed, largest_micro_batch, plan_memory
from pipeline.planning.subject import Subject


@dataclass(frozen=True)
class Change:
    """A change of the config by itself.

    Attributes:
        overrides: as the command line takes them.
        cost: what it costs, in a few words.
        memory: with it.
        saving: bytes, against the plan without it.
    """

    overrides: str
    cost: str
    memory: Memory
    saving: int


def changes(subject: Subject, memory: Memory) -> list[Change]:
    """Changes that save memory, the largest saving first.

    Args:
        subject: the run.
        memory: its plan.
    """
    found = [
        Change(overrides, cost, after, memory.total - after.total)
        for overrides, cost, other in _candidates(subject, memory)
        if (after := plan_memory(other)).total < memory.total
    ]
    return sorted(found, key=lambda change: -change.saving)


def together(subject: Subject, memory: Memory) -> tuple[str, int]:
    """Where no change alone is enough: all that leave the result as it is, and the largest micro-batch size with them; 0: none fits."""
    overrides = []
    for change, _, other in _candidates(subject, memory, sizes=False):
        if not change.startswith("train.precision") and plan_memory(other).total < memory.total:
            overrides.append(change)
            key, value = change.split("=")
            section, name = key.split(".")
            subject = changed(subject, section, **{name: True if value == "true" else int(value)})
    return " ".join(overrides), largest_micro_batch(subject)


def _candidates(subject: Subject, memory: Memory, sizes: bool = True) -> Iterator[tuple[str, str, Subject]]:
    """Overrides, what they cost, and the subject with them."""
    train = subject.config.train
    if not train.activation_checkpointing:
        yield (
            "train.activation_checkpointing=true",
            "about a quarter more time, the same result",
            changed(subject, "train", activation_checkpointing=True),
        )
    if subject.world_size > 1:
        for stage in range(memory.stage + 1, 4):
            cost = "more traffic, the same result" if stage == 3 else "the same result"
            yield f"train.zero_stage={stage}", cost, changed(subject, "train", zero_stage=stage)
    if memory.precision == "fp32" and (subject.gpu is None or subject.gpu.bf16_flops):
        yield "train.precision=bf16", "a begun run keeps its precision", changed(subject, "train", precision="bf16")
    if memory.in_evaluation and (smaller := min(train.micro_batch, subject.config.eval.batch_size // 2)):
        yield f"eval.batch_size={smaller}", "the same result", changed(subject, "eval", batch_size=smaller)
    if sizes and (largest := largest_micro_batch(subject)) and largest < memory.micro_batch:
        accumulation = memory.accumulation * memory.micro_batch // largest
        yield (
            f"train.micro_batch_size={largest}",
            f"{accumulation} micro-batches per step; BatchNorm sees fewer images at a time",
            changed(subject, "train", micro_batch_size=largest),
        )
