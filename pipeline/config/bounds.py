"""Define the types of config values with their bounds, and what all sections have in common."""

from __future__ import annotations

import unicodedata
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

# Sanity bounds: far above any recipe, far below overflow or exhausted memory. A typo (an extra zero, the wrong unit) is an
# error message instead of a run that hangs.
MAX_SHAPE = 2**20  # tensor dimensions: classes, widths
MAX_SIDE = 2**12  # pixels: attention over a larger grid fits into no GPU's memory
MAX_BATCH = 2**14  # images per rank and forward pass: likewise
MAX_GLOBAL_BATCH = 2**20  # images per optimizer step; the largest published ones are below 2**17
MAX_STEPS = 10**12  # steps and event counts: times MAX_GLOBAL_BATCH it still fits into 64 bits
MAX_PROFILED = 100  # steps of one profile: a step of PerViT-M is tens of thousands of events, which wait in memory
MAX_EPOCHS = 1e6  # Philox counters have 32 bits for the epoch (pipeline.stream.philox)
MAX_SECONDS = 30 * 24 * 3600.0  # 30 days; timeouts of collectives and stores overflow long before a float does
MAX_RATE = 1e3  # learning rate, weight decay
MAX_SWITCH = 2**63 - 1  # integers that JSON and checkpoints can hold; a model's own bounds are narrower

PositiveInt = Annotated[int, Field(ge=1, le=MAX_SHAPE)]
Steps = Annotated[int, Field(ge=1, le=MAX_STEPS)]
Window = tuple[Steps, Steps]  # first and last step
Count = Annotated[int, Field(ge=0, le=MAX_STEPS)]
BatchSize = Annotated[int, Field(ge=1, le=MAX_BATCH)]
GlobalBatchSize = Annotated[int, Field(ge=1, le=MAX_GLOBAL_BATCH)]
Epochs = Annotated[float, Field(gt=0, le=MAX_EPOCHS, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=0, le=MAX_RATE, allow_inf_nan=False)]
PositiveRate = Annotated[float, Field(gt=0, le=MAX_RATE, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Aspect = Annotated[float, Field(ge=0.01, le=100)]
Mean = Annotated[float, Field(ge=-10, le=10, allow_inf_nan=False)]  # of pixels in [0, 1]; rejects values meant for [0, 255]
Deviation = Annotated[float, Field(ge=1e-3, le=10, allow_inf_nan=False)]


def _printable(text: str) -> str:
    for character in text:
        if unicodedata.category(character) in ("Cc", "Zl", "Zp"):
            raise ValueError(f"must be printable, got the control character U+{ord(character):04X}")
    return text


Text = Annotated[str, Field(min_length=1, max_length=1024), AfterValidator(_printable)]


class Section(BaseModel):
    """A section of the config: immutable, rejects unknown keys. A field's docstring is its description in the key table."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_booleans_for_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        # pydantic would coerce `true` to 1. Its coercion of strings is wanted: YAML 1.1 reads 5e-4 as one.
        annotation = str(cls.model_fields[str(info.field_name)].annotation)
        parts = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(part, bool) for part in parts) and "bool" not in annotation and "Any" not in annotation:
            raise ValueError("must be a number or text, not a boolean")
        return value
