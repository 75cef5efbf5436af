"""Whether the files of a checkpoint cover every parameter exactly once, judged by their headers alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError

from pipeline.checkpoint.headers import Header
from pipeline.checkpoint.held import ADAM_MOMENTS, EMA, MOMENTS, WEIGHT
from pipeline.checkpoint.manifest import CheckpointManifest
from pipeline.checkpoint.parts import BUFFER, EMA_BUFFER, Parts


def find_gaps(folder: Path, manifest: CheckpointManifest, headers: Mapping[str, Header] | None = None) -> list[str]:
    """Find what is missing, duplicated or unknown.

    Every parameter needs its weight. An average exists for all parameters or for none, and for all buffers of floating point or
    for none; a parameter has both moments or neither, as a frozen one.

    Args:
        folder: of the checkpoint.
        manifest: of the checkpoint.
        headers: of its files, where they are known; else all of them are opened.

    Returns:
        A sentence for each quantity of a parameter that is not covered exactly once.
    """
    try:
        parts = Parts(folder, [record.name for record in manifest.files], headers)
    except (SafetensorError, OSError, ValueError) as error:
        return [f"{folder} has a file that is no safetensors file ({error})"]
    sentences = []
    for quantity in (WEIGHT, *MOMENTS, EMA):
        found = parts.slices(quantity)
        needed = manifest.shapes.keys() if quantity == WEIGHT or (quantity == EMA and found) else found.keys()
        for name in sorted(found.keys() | needed):
            problem = _problem(found.get(name, []), manifest.shapes.get(name))
            if problem:
                sentences.append(f"{folder}: {quantity} of {name} {problem}")
    first, second = (parts.slices(moment).keys() for moment in ADAM_MOMENTS)
    sentences += [f"{folder}: {name} has one of AdamW's two moments only" for name in sorted(first ^ second)]
    buffers = parts.slices(BUFFER)
    sentences += [f"{folder}: buffer {name} is there {len(found)} times" for name, found in buffers.items() if len(found) != 1]
    averages = parts.slices(EMA_BUFFER)
    if averages and averages.keys() != (floating := set(parts.floating_buffers())):
        name = min(averages.keys() ^ floating)
        sentences.append(
            f"{folder}: buffer {name} has {'an average, but is not there' if name in averages else 'no average, others have'}"
        )
    for name in averages.keys() & buffers.keys():
        if problem := _problem(averages[name], [buffers[name][0][1]]):
            sentences.append(f"{folder}: the average of buffer {name} {problem}")
    return sentences


def _problem(slices: list[tuple[int, int]], shape: list[int] | None) -> str | None:
    """What is wrong with the sorted slices of a flattened parameter, or None."""
    if shape is None:
        return "is of a parameter that the model does not have"
    at = 0
    for start, count in slices:
        if start != at:
            return f"is missing from {at} to {start}" if start > at else f"is there twice from {start} to {at}"
        at = start + count
    total = math.prod(shape)
    return None if at == total else f"ends at {at}, {total} numbers needed"
