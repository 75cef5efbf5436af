"""Write and read the files of a checkpoint: safetensors with named slices of flattened tensors, and their checksums.

A tensor's key is QUANTITY/NAME/START: what it is, of which parameter or buffer, and its first element in the flattened parameter. At a
thousand ranks a checkpoint may have a thousand files. If every rank opened each of them at a start, that would be a million requests
to the file system's metadata server; so a rank reads the headers of its share and opens only those files that hold what it needs.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor

from pipeline.checkpoint.manifest import FileRecord

WEIGHT, EMA = "weight", "ema"  # quantities of a parameter; those of the optimizer: optimizer_quantity
BUFFER, EMA_BUFFER = "buffer", "ema_buffer"  # as in the model; averaged: flattened, those of floating point
_DTYPES = {"float32": "F32", "float64": "F64", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL"}
_DTYPES |= {"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8"}
_CHUNK = 16 << 20  # bytes per checksum update and write: large against a system call, small against a part


class Entry(NamedTuple):
    """A tensor of a file, by the file's header."""

    key: str
    shape: list[int]
    dtype: str  # as safetensors calls it


Headers = Mapping[str, list[Entry]]  # by file name


def optimizer_quantity(state: str) -> str:
    """The quantity of an optimizer's state, such as ``optimizer.exp_avg``."""
    return f"optimizer.{state}"


def slice_key(quantity: str, name: str, start: int) -> str:
    """The key of a slice, such as ``optimizer.exp_avg/head.weight/4096``."""
    return f"{quantity}/{name}/{start}"


def write_part(path: Path, tensors: dict[str, Tensor]) -> FileRecord:
    """Write tensors to a safetensors file and sync it.

    The library's own writer holds the GIL while it copies, and computes no checksum.

    Args:
        tensors: on the CPU, contiguous.

    Raises:
        OSError: the disk is full, for example; the file is then removed.
    """
    header, offset = {}, 0
    for key, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        dtype = _DTYPES[str(tensor.dtype).removeprefix("torch.")]
        header[key] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    blocks: list[bytes | memoryview] = [len(text).to_bytes(8, "little"), text, *map(_bytes, tensors.values())]
    try:
        with open(path, "wb") as file:
            record = _write_blocks(file, path.name, blocks)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return record


def _write_blocks(file: BinaryIO, name: str, blocks: Iterable[bytes | memoryview]) -> FileRecord:
    digest, written = xxhash.xxh3_128(), 0
    for block in blocks:
        for first in range(0, len(block), _CHUNK):
            chunk = block[first : first + _CHUNK]
            digest.update(chunk)
            file.write(chunk)
        written += len(block)
    return FileRecord(name, written, digest.hexdigest())


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data  # NumPy has no bfloat16


def read_headers(folder: Path, names: Iterable[str]) -> dict[str, list[Entry]]:
    """Read which tensors some files of a checkpoint hold.

    Raises:
        safetensors.SafetensorError: a file is not a safetensors file.
        OSError: a file cannot be read.
    """
    headers = {}
    for name in names:
        with safe_open(folder / name, framework="pt") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 - not a dict
            headers[name] = [Entry(key, list(found.get_shape()), found.get_dtype()) for key, found in slices.items()]
    return headers


class SliceReader:
    """Reads slices from the files of a checkpoint, however it was sharded when it was saved.

    ``headers`` are those of all files of the folder (:func:`read_headers`). A file is opened, and mapped into memory, when
    something is read from it; it must be intact (:func:`~pipeline.checkpoint.verification.find_damage`).

    Raises:
        ValueError: a file has a tensor that does not belong in a checkpoint.
    """

    def __init__(self, folder: Path, headers: Headers) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        self._slices: dict[tuple[str, str], list[tuple[int, str, Entry]]] = defaultdict(list)
        for file, entries in headers.items():
            for entry in entries:
                quantity, name, start = entry.key.split("/")
                if quantity != BUFFER and len(entry.shape) != 1:
                    raise ValueError(f"{entry.key} is not a slice of a flattened tensor")
                self._slices[quantity, name].append((int(start), file, entry))
        for slices in self._slices.values():
            slices.sort()

    @property
    def opened(self) -> list[str]:
        """Names of the files that have been opened so far."""
        return list(self._files)

    @property
    def quantities(self) -> set[str]:
        """Everything that is there of any parameter or buffer."""
        return {quantity for quantity, _ in self._slices}

    def _file(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = safe_open(self._folder / name, framework="pt")
        return self._files[name]

    def slices(self, quantity: str) -> dict[str, list[tuple[int, int]]]:
        """The slices of a quantity by headers alone: name -> [(offset, count), ...], ascending."""
        return {
            name: [(start, math.prod(entry.shape)) for start, _, entry in slices]
            for (have, name), slices in self._slices.items()
            if have == quantity
        }

    def floating_buffers(self) -> set[str]:
        """Names of the buffers of floating point, by headers alone."""
        dtypes = {name: slices[0][2].dtype for (have, name), slices in self._slices.items() if have == BUFFER}
        return {name for name, dtype in dtypes.items() if dtype.startswith(("F", "BF"))}

    def read(self, quantity: str, name: str, start: int, count: int) -> Tensor:
        """Read elements ``start`` to ``start + count`` of a flattened tensor, joined from as many slices as needed.

        Returns:
            (count,)

        Raises:
            KeyError: some of them are in no file.
        """
        slices = self._slices.get((quantity, name), [])
        found, at = [], start
        first = max(0, bisect_right([begin for begin, _, _ in slices], start) - 1)
        for begin, file, entry in slices[first:]:
            (length,) = entry.shape
            if not begin <= at < begin + length or at == start + count:
                break
            found.append(self._file(file).get_slice(entry.key)[at - begin : min(start + count - begin, length)])
            at += len(found[-1])
        if at != start + count:
            raise KeyError(f"{quantity} of {name}: {start} to {start + count}, present to {at}")
        return found[0] if len(found) == 1 else torch.cat(found)

    def read_buffer(self, name: str) -> Tensor:
        """Read a buffer in full; a ``KeyError`` if it is in no file."""
        if (BUFFER, name) not in self._slices:
            raise KeyError(f"the buffer {name}")
        ((_, file, entry),) = self._slices[BUFFER, name]
        return self._file(file).get_tensor(entry.key)
