"""Name and group TensorBoard's curves, and the settings by which it compares runs.

TensorBoard sorts groups by name, expands the first two, and shows about four curves before one has to scroll. So the first group,
``at_a_glance``, has copies of those that tell whether a run learns, is fast and is healthy, and two more for wider screens: a point
for each flush of the log, and for each evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.config import Config, flatten

GLANCE = "at_a_glance"
_UTILIZATION = ("images_per_second", "mfu", "data_wait", "memory_gib", "peak_memory_gib")
_TROUBLE = ("replaced", "bad_samples", "skipped_steps")
_GROUPS = {**dict.fromkeys(_UTILIZATION, "utilization"), **dict.fromkeys(_TROUBLE, "trouble")}
_BEGINNINGS = ("seed", "model.", "augment.", "train.", "optim.", "data.path", "data.crop_", "data.flip", "data.train_")
NO_CURVES = ("step", "time", "epoch", "samples", "correct1", "correct5", "count")  # straight lines, or duplicates


def suffix(weights: str) -> str:
    """What the names of an evaluation's curves end with: "_ema" for averaged weights."""
    return "" if weights == "model" else f"_{weights}"


def of_row(row: Mapping[str, Any], group: str, suffix: str = "") -> dict[str, float]:
    """Name -> value for a row of metrics.jsonl, of ``train`` or ``eval``."""
    numbers = {name: value for name, value in row.items() if isinstance(value, (int, float)) and name not in NO_CURVES}
    groups = {
        name: "store" if name.startswith("store_") else _GROUPS.get(name.removesuffix("_rank"), group) for name in numbers
    }
    return {f"{groups[name]}/{name}{suffix}": value for name, value in numbers.items()}


def of_steps(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of the first group, for the rows of one flush."""
    last = rows[-1]
    values = {
        "2_loss": math.fsum(row["loss"] for row in rows) / len(rows),
        "3_images_per_second": last["images_per_second"],
        "4_skipped_or_bad": last["bad_samples"] + last["skipped_steps"],
        "5_grad_norm": last["grad_norm"],
        "6_data_wait": last["data_wait"],
    }
    return {f"{GLANCE}/{name}": value for name, value in values.items()}


def of_evaluation(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Of the first group, for results by name of the weights: that of the average where the run keeps one."""
    return {f"{GLANCE}/1_top1": results["ema" if "ema" in results else "model"]["top1"]}


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
