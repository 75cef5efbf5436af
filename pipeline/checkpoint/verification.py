"""Verify a checkpoint: its files against their checksums, and whether together they cover everything exactly once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from pipeline.checkpoint.manifest import CheckpointManifest, FileRecord, open_own
from pipeline.errors import UserError

if TYPE_CHECKING:
    from pipeline.checkpoint.parts import Headers

_CHUNK = 16 << 20  # bytes per read


def checksum(path: Path) -> FileRecord:
    """Name, size and XXH3-128 of a file as it is now.

    Raises:
        UserError: it is not a regular file.
        OSError: it cannot be read.
    """
    digest, size = xxhash.xxh3_128(), 0
    with open_own(path) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileRecord(path.name, size, digest.hexdigest())


def find_damage(folder: Path, files: list[FileRecord], contents: bool = True) -> list[str]:
    """Compare files with their records in the manifest; a sentence for each that differs.

    Without ``contents``, only existence and size are compared, and no checksum.

    Raises:
        OSError: a file cannot be read now, which says nothing about its contents.
    """
    sentences = []
    for written in files:
        path = folder / written.name
        try:
            with open_own(path) as file:
                size = file.seek(0, 2)
            if size != written.bytes:
                sentences.append(f"{path} has {size} bytes, {written.bytes} were written")
            elif contents and checksum(path) != written:
                sentences.append(f"{path} was changed after it was written: its checksum does not match")
        except FileNotFoundError:
            sentences.append(f"{path} is missing")
        except UserError as error:
            sentences.append(error.problem)  # the caller adds its own remedy
    return sentences


def find_gaps(folder: Path, manifest: CheckpointManifest, headers: Headers | None = None) -> list[str]:
    """Find what is missing, duplicated or unknown in files whose checksums are right, by their headers alone,
    which are read where they are not given.

    Every parameter needs its weight, and what the manifest says that the optimizer keeps for it. An average exists for all parameters
    or for none, and for all buffers of floating point or for none.

    Returns:
        A sentence for each quantity of a parameter or buffer that is not covered exactly once.
    """
    from safetensors import SafetensorError  # PyTorch is imported only where a file is looked into

    from pipeline.checkpoint.parts import BUFFER, EMA, EMA_BUFFER, WEIGHT, SliceReader, optimizer_quantity, read_headers

    try:
        reader = SliceReader(folder, headers or read_headers(folder, [record.name for record in manifest.files]))
    except (SafetensorError, OSError, ValueError) as error:
        return [f"{folder} has a file that is not a checkpoint's safetensors file ({error})"]
    sizes = {name: math.prod(shape) for name, shape in manifest.shapes.items()}
    needed = {WEIGHT: sizes, EMA: sizes if EMA in reader.quantities else {}}  # quantity -> parameter -> numbers
    for kept in manifest.optimizer_state:
        for name in kept.parameters:
            for state in kept.tensors:
                needed.setdefault(optimizer_quantity(state), {})[name] = sizes.get(name, 0)
            for state in kept.scalars:
                needed.setdefault(optimizer_quantity(state), {})[name] = 1
    sentences = []
    for quantity in sorted(needed.keys() | reader.quantities - {BUFFER, EMA_BUFFER}):
        slices, wanted = reader.slices(quantity), needed.get(quantity, {})
        for name in sorted(slices.keys() | wanted.keys()):
            if problem := _problem(slices.get(name, []), wanted.get(name)):
                sentences.append(f"{folder}: {quantity} of {name} {problem}")
    buffers, averages = reader.slices(BUFFER), reader.slices(EMA_BUFFER)
    sentences += [f"{folder}: buffer {name} is there {len(found)} times" for name, found in buffers.items() if len(found) != 1]
    if averages and averages.keys() != (floating := reader.floating_buffers()):
        name = min(averages.keys() ^ floating)
        sentences.append(
            f"{folder}: buffer {name} has {'an average, but is not there' if name in averages else 'no average, others have'}"
        )
    for name in averages.keys() & buffers.keys():
        if problem := _problem(averages[name], buffers[name][0][1]):
            sentences.append(f"{folder}: the average of buffer {name} {problem}")
    return sentences


def _problem(slices: list[tuple[int, int]], total: int | None) -> str | None:
    """What is wrong with the sorted slices of a flattened tensor of ``total`` elements, or None."""
    if total is None:
        return "is not what this model and optimizer have"
    at = 0
    for start, count in slices:
        if start != at:
            return f"is missing from {at} to {start}" if start > at else f"is there twice from {start} to {at}"
        at = start + count
    return None if at == total else f"must end at {total}, got {at}"
