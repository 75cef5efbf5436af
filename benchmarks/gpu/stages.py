"""The stages in their order. The first two say what the others ran on; then what is worth most if the whole is cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MINUTES = 8.0


@dataclass(frozen=True)
class Stage:
    """A part of the measurement, run as a process of its own.

    Attributes:
        name: in ``--only`` and in the rows.
        module: in this package; its ``measure`` gives the rows.
        seconds: at most, of :data:`MINUTES`.
        title: above its table.
        needs: a stage whose result it reads.
        variables: of its environment.
        in_miniature: likewise, on a CPU.
    """

    name: str
    module: str
    seconds: float
    title: str
    needs: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    in_miniature: Mapping[str, str] = field(default_factory=dict)


# An error where the kernels cannot run, instead of the plain form under their name; on a CPU they are interpreted.
_KERNELS, _INTERPRETED = {"PERVIT_ATTENTION": "triton"}, {"TRITON_INTERPRET": "1"}

STAGES = [
    Stage("machine", "machine", 15, "Machine"),
    Stage("data", "data", 25, "Data"),
    Stage("tests", "suite", 60, "Tests marked gpu"),
    Stage(
        "attention",
        "attention",
        45,
        "Peripheral attention, one layer, forward and backward",
        variables=_KERNELS,
        in_miniature=_INTERPRETED,
    ),
    Stage("steps_t", "steps", 80, "Training steps, PerViT-T", needs="data"),
    Stage("steps_m", "steps", 65, "Training steps, PerViT-M", needs="data"),
    Stage("steps_s", "steps", 50, "Training steps, PerViT-S", needs="data"),
    Stage("deterministic", "steps", 20, "Training steps, PerViT-T, deterministic algorithms only", needs="data"),
    Stage("loader", "loading", 30, "The loader alone", needs="data"),
    Stage("pixels", "loading", 20, "Pixels: GPU against CPU, in levels of 255", needs="data"),
    Stage("saving", "saving", 25, "Checkpoint"),
    Stage("faults", "faults", 45, "A lost process among two", needs="data"),
]
BY_NAME = {stage.name: stage for stage in STAGES}
assert sum(stage.seconds for stage in STAGES) <= 60 * MINUTES
