"""Write and read the files of a checkpoint, safetensors with named slices of flattened tensors, and find gaps between the slices.

A tensor's key is QUANTITY/NAME/START: what it is, of which parameter or buffer, and its first element in the flattened parameter. At a
thousand ranks a checkpoint may have a thousand files. If every rank opened each of them at a start, that would be a million requests
to the file system's metadata server; so a rank reads the headers of its share and opens only those files that hold what it needs.
"""

import json
import math
import os
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeline.checkpoint.manifest import CheckpointManifest, FileRecord

WEIGHT, EMA = "weight", "ema"  # quantities of a parameter; those of the optimizer: optimizer_quantity
BUFFER, EMA_BUFFER = "buffer", "ema_buffer"  # as in the model; averaged: flattened, those of floating point
_DTYPES = {"float32": "F32", "float64": "F64", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL"}
_DTYPES |= {"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8"}
_CHUNK = 16 << 20  # bytes per checksum update and write: large against a system call, small against a part


class Entry(NamedTuple):
    """A tensor of a file, by the file's header."""

    file: str
    key: str
    shape: list[int]
    dtype: str  # as safetensors calls it


def optimizer_quantity(state: str) -> str:
    return f"optimizer.{state}"


def slice_key(quantity: str, name: str, start: int) -> str:
    """The key of a slice, such as ``optimizer.exp_avg/head.weight/4096``."""
    return f"{quantity}/{name}/{start}"


def write_part(path: Path, tensors: dict[str, Tensor]) -> FileRecord:
    """Write tensors, contiguous on the CPU, to a safetensors file and sync it; after an ``OSError`` there is no file."""
    # The library's own writer holds the GIL while it copies, and computes no checksum.
    header, offset = {}, 0
    for key, tensor in tensors.items():
        begin, offset = offset, offset + tensor.nbytes
        dtype = _DTYPES[str(tensor.dtype).removeprefix("torch.")]
        header[key] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, offset]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    contents = (tensor.reshape(-1).view(torch.uint8).numpy().data for tensor in tensors.values())  # NumPy has no bfloat16
    blocks: list[bytes | memoryview] = [len(text).to_bytes(8, "little"), text, *contents]
    digest = xxhash.xxh3_128()
    try:
        with open(path, "wb") as file:
            for chunk in (block[first : first + _CHUNK] for block in blocks for first in range(0, len(block), _CHUNK)):
                digest.update(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
            return FileRecord(path.name, file.tell(), digest.hexdigest())
    except OSError:
        path.unlink(missing_ok=True)
        raise


def read_headers(folder: Path, files: Iterable[FileRecord]) -> list[Entry]:
    """Read which tensors some files of a checkpoint hold; a ``SafetensorError`` or ``OSError`` if one cannot be read."""
    entries = []
    for record in files:
        with safe_open(folder / record.name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a dict
                found = file.get_slice(key)
                entries.append(Entry(record.name, key, list(found.get_shape()), found.get_dtype()))
    return entries


def find_not_finite(folder: Path, files: Iterable[FileRecord]) -> list[str]:
    """A sentence for each tensor with numbers that no training saves: NaN, or infinite weights. Raises as :func:`read_headers`."""
    sentences = []
    for record in files:
        with safe_open(folder / record.name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a dict
                values, quantity = file.get_tensor(key), key.partition("/")[0]
                finite = values.isfinite() if quantity in (WEIGHT, EMA) else ~values.isnan()  # a moment may overflow
                if quantity not in (BUFFER, EMA_BUFFER) and not finite.all():
                    sentences.append(f"{folder / record.name} has numbers that are not finite in {key}")
    return sentences


class SliceReader:
    """Reads slices from the intact files of a checkpoint, however it was sharded. ``entries``: of all files of the folder
    (:func:`read_headers`). A file is opened, and mapped into memory, when something is read from it. Raises ValueError: a file has a
    tensor that does not belong in a checkpoint."""

    def __init__(self, folder: Path, entries: Iterable[Entry]) -> None:
        self._folder = folder
        self.opened: dict[str, Any] = {}  # files by name
        # quantity -> name -> the slices with their starts, ascending
        self._slices: dict[str, dict[str, list[tuple[int, Entry]]]] = defaultdict(lambda: defaultdict(list))
        for entry in entries:
            quantity, name, start = entry.key.split("/")
            if quantity != BUFFER and len(entry.shape) != 1:
                raise ValueError(f"{entry.key} is not a slice of a flattened tensor")
            insort(self._slices[quantity][name], (int(start), entry))

    @property
    def quantities(self) -> set[str]:
        """What is there of any parameter or buffer."""
        return set(self._slices)

    def _file(self, name: str) -> Any:
        if name not in self.opened:
            try:
                self.opened[name] = safe_open(self._folder / name, framework="pt")
            except RuntimeError as error:  # of PyTorch, which maps it
                raise OSError(str(error)) from None
        return self.opened[name]

    def slices(self, quantity: str) -> dict[str, list[tuple[int, int]]]:
        """The slices of a quantity by headers alone: name -> [(offset, count), ...], ascending."""
        found = self._slices.get(quantity, {})
        return {name: [(start, math.prod(entry.shape)) for start, entry in slices] for name, slices in found.items()}

    def floating_buffers(self) -> set[str]:
        """Names of the buffers of floating point, by headers alone."""
        return {name for name, [(_, entry), *_] in self._slices[BUFFER].items() if entry.dtype.startswith(("F", "BF"))}

    def read(self, quantity: str, name: str, start: int, count: int) -> Tensor:
        """Read elements ``start`` to ``start + count`` of a flattened tensor, (count,); a ``KeyError`` if some are in no file."""
        slices = self._slices.get(quantity, {}).get(name, [])
        found, at = [], start
        first = max(0, bisect_right([begin for begin, _ in slices], start) - 1)
        for begin, entry in slices[first:]:
            (length,) = entry.shape
            if not begin <= at < begin + length or at == start + count:
                break
            found.append(self._file(entry.file).get_slice(entry.key)[at - begin : min(start + count - begin, length)])
            at += len(found[-1])
        if at != start + count:
            raise KeyError(f"{quantity} of {name}: {start} to {start + count}, present to {at}")
        return found[0] if len(found) == 1 else torch.cat(found)

    def read_buffer(self, name: str) -> Tensor:
        """Read a buffer in full; a ``KeyError`` if it is in no file."""
        if name not in self._slices[BUFFER]:
            raise KeyError(f"the buffer {name}")
        ((_, entry),) = self._slices[BUFFER][name]
        return self._file(entry.file).get_tensor(entry.key)


def find_gaps(folder: Path, manifest: CheckpointManifest, entries: list[Entry] | None = None) -> list[str]:
    """Find what files with right checksums do not cover exactly once: a sentence for each quantity of a parameter or buffer.

    Every parameter needs its weight, and what the manifest says that the optimizer keeps for it. An average exists for all parameters
    or for none, and for all buffers of floating point or for none. Headers are read where ``entries`` are not given.
    """
    try:
        reader = SliceReader(folder, entries or read_headers(folder, manifest.files))
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
        problem = "an average, but is not there" if name in averages else "no average, others have"
        sentences.append(f"{folder}: buffer {name} has {problem}")
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
