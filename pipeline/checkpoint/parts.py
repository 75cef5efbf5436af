"""A checkpoint's safetensors files: named slices of flattened tensors, written with a checksum and read slice by slice."""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor

from pipeline.checkpoint.headers import Entry, Header, read_header
from pipeline.checkpoint.manifest import FileRecord

BUFFER, EMA_BUFFER = "buffer", "ema_buffer"  # as in the model; averaged: flattened, those of floating point
_DTYPES = {"float32": "F32", "float64": "F64", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL"}
_DTYPES |= {"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8"}
_CHUNK = 16 << 20  # bytes per checksum update and write: large against a system call, small against a part


def slice_key(quantity: str, name: str, start: int) -> str:
    """The key of a slice, such as ``exp_avg/head.weight/4096``."""
    return f"{quantity}/{name}/{start}"


def write_part(path: Path, tensors: dict[str, Tensor]) -> FileRecord:
    """Write tensors to a safetensors file and sync it.

    The library's own writer holds the GIL while it copies, and computes no checksum.

    Args:
        path: the file.
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


class Parts:
    """Reads slices from the files of a checkpoint, however it was sharded when it was saved.

    The files are memory-mapped, so they must be intact (:func:`~pipeline.checkpoint.whole.find_damage`).

    Args:
        folder: of the checkpoint.
        names: of its files.
        headers: of the files, where they are known: then a file is opened when something is read from it, else at once.

    Raises:
        ValueError: a file has a tensor that does not belong in a checkpoint.
        safetensors.SafetensorError: a file is not a safetensors file.
        OSError: a file cannot be read.
    """

    def __init__(self, folder: Path, names: list[str], headers: Mapping[str, Header] | None = None) -> None:
        self._folder, self._names = folder, names
        self._files: dict[int, Any] = {}
        self._slices: dict[tuple[str, str], list[tuple[int, int, Entry]]] = defaultdict(list)
        for number, name in enumerate(names):
            for entry in read_header(self._file(number)) if headers is None else headers[name]:
                quantity, of, start = entry.key.split("/")
                if quantity != BUFFER and len(entry.shape) != 1:
                    raise ValueError(f"{entry.key} is not a slice of a flattened tensor")
                self._slices[quantity, of].append((int(start), number, entry))
        for pieces in self._slices.values():
            pieces.sort(key=lambda piece: piece[:2])

    @property
    def opened(self) -> list[str]:
        """Names of the files that have been opened so far."""
        return [self._names[number] for number in self._files]

    def _file(self, number: int) -> Any:
        if number not in self._files:
            self._files[number] = safe_open(self._folder / self._names[number], framework="pt")
        return self._files[number]

    def names(self, quantity: str) -> list[str]:
        """Names of the tensors with this quantity."""
        return [name for have, name in self._slices if have == quantity]

    def floating_buffers(self) -> list[str]:
        """Names of the buffers of floating point. Reads headers only."""
        dtypes = {name: pieces[0][2].dtype for (have, name), pieces in self._slices.items() if have == BUFFER}
        return [name for name, dtype in dtypes.items() if dtype.startswith(("F", "BF"))]

    def slices(self, quantity: str) -> dict[str, list[tuple[int, int]]]:
        """The slices of a quantity: name -> [(offset, count), ...], ascending. Reads headers only."""
        found = {}
        for (have, name), pieces in self._slices.items():
            if have == quantity:
                found[name] = [(start, math.prod(entry.shape)) for start, _, entry in pieces]
        return found

    def read(self, quantity: str, name: str, start: int, count: int) -> Tensor:
        """Elements ``start`` to ``start + count`` of a flattened tensor, joined from as many slices as needed.

        Returns:
            (count,)

        Raises:
            KeyError: some of them are in no file.
        """
        pieces = self._slices.get((quantity, name), [])
        found, at = [], start
        first = max(0, bisect_right([piece[0] for piece in pieces], start) - 1)
        for piece_start, number, entry in pieces[first:]:
            (length,) = entry.shape
            if not piece_start <= at < piece_start + length or at == start + count:
                break
            piece = self._file(number).get_slice(entry.key)[at - piece_start : min(start + count - piece_start, length)]
            found.append(piece)
            at += len(piece)
        if at != start + count:
            raise KeyError(f"{quantity} of {name}: {start} to {start + count}, present to {at}")
        return found[0] if len(found) == 1 else torch.cat(found)

    def read_buffer(self, name: str) -> Tensor:
        """A buffer in full.

        Raises:
            KeyError: it is in no file.
        """
        if (BUFFER, name) not in self._slices:
            raise KeyError(f"the buffer {name}")
        ((_, number, entry),) = self._slices[BUFFER, name]
        return self._file(number).get_tensor(entry.key)
