"""Whether the files of a checkpoint hold everything once; they are told by their headers, no number is read."""

from __future__ import annotations

import math
from pathlib import Path

from safetensors import SafetensorError

from pipeline.checkpoint.held import EMA, MOMENTS, WEIGHT
from pipeline.checkpoint.manifest import CheckpointManifest
from pipeline.checkpoint.parts import BUFFER, Parts


def find_gaps(folder: Path, manifest: CheckpointManifest) -> list[str]:
    """Look for what is missing, saved twice or unknown.

    Every parameter must have its weight. The average is there for all parameters or for none, and so are the moments for each:
    a frozen parameter has none.

    Args:
        folder: the checkpoint's.
        manifest: of it.

    Returns:
        A sentence for each quantity of a parameter that is not there exactly once.
    """
    try:
        parts = Parts(folder, [record.name for record in manifest.files])
    except (SafetensorError, OSError, ValueError) as error:
        return [f"{folder} has a file that is no safetensors file ({error})"]
    sentences = []
    for quantity in (WEIGHT, *MOMENTS, EMA):
        found = parts.stretches(quantity)
        needed = manifest.shapes.keys() if quantity == WEIGHT or (quantity == EMA and found) else found.keys()
        for name in sorted(found.keys() | needed):
            problem = _problem(found.get(name, []), manifest.shapes.get(name))
            if problem:
                sentences.append(f"{folder}: {quantity} of {name} {problem}")
    first, second = (parts.stretches(moment).keys() for moment in MOMENTS)
    sentences += [f"{folder}: {name} has one of AdamW's two moments only" for name in sorted(first ^ second)]
    buffers = parts.stretches(BUFFER)
    sentences += [f"{folder}: buffer {name} is there {len(found)} times" for name, found in buffers.items() if len(found) != 1]
    return sentences


def _problem(stretches: list[tuple[int, int]], shape: list[int] | None) -> str | None:
    """What is wrong with the ascending stretches of a flattened parameter, if anything is."""
    if shape is None:
        return "is of a parameter that the model does not have"
    at = 0
    for start, count in stretches:
        if start != at:
            return f"is missing from {at} to {start}" if start > at else f"is there twice from {start} to {at}"
        at = start + count
    total = math.prod(shape)
    return None if at == total else f"ends at {at}, {total} numbers needed"
