"""What TensorBoard's HParams compares runs by."""

from __future__ import annotations

from typing import Any

from pipeline.config import Config, flatten

_BEGINNINGS = ("seed", "model.", "augment.", "train.", "optim.", "data.path", "data.crop_", "data.flip", "data.train_")


def hyperparameters(config: Config) -> dict[str, float | str]:
    """Dotted key -> value of all that may change what is learned; null, lists and switches as text."""
    chosen = {key: value for key, value in flatten(config).items() if key.startswith(_BEGINNINGS)}
    return {key: _plain(value) for key, value in chosen.items()}


def _plain(value: Any) -> float | str:
    if isinstance(value, dict):
        return " ".join(f"{name}={_plain(part)}" for name, part in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    if value is None:
        return "none"  # left out, a run would not count as one that differs
    return str(value).lower() if isinstance(value, bool) else value
