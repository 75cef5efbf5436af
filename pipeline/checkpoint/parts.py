"""A checkpoint's files: safetensors with named stretches of flattened tensors, written with a checksum, read by stretch."""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor

from pipeline.checkpoint.manifest import FileRecord

BUFFER = "buffer"
_DTYPES = {"float32": "F32", "float64": "F64", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL"}
_DTYPES |= {"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8"}
_CHUNK = 16 << 20


def stretch_key(quantity: str, name: str, start: int) -> str:
    """Under which a stretch is stored, for example ``exp_avg/head.weight/4096``."""
    return f"{quantity}/{name}/{start}"


def write_part(path: Path, tensors: dict[str, Tensor]) -> FileRecord:
    """Write tensors as a safetensors file and wait until it is on the disk.

    The library's own writer would hold the interpreter while it copies, and give no checksum.

    Args:
        path: the file.
        tensors: on the CPU, contiguous.

    Raises:
        OSError: the disk is full, for example; then there is no file.
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
    """Reads stretches from all files of a checkpoint, each from wherever it was saved.

    The files are mapped into memory: they must be whole (:func:`~pipeline.checkpoint.whole.find_damage`).

    Args:
        folder: the checkpoint's.
        names: of its files.

    Raises:
        ValueError: a tensor in them is none that a checkpoint has.
        safetensors.SafetensorError: one is no safetensors file.
        OSError: one cannot be read.
    """

    def __init__(self, folder: Path, names: list[str]) -> None:
        self._files = [safe_open(folder / name, framework="pt") for name in names]
        self._stretches: dict[tuple[str, str], list[tuple[int, int, str]]] = defaultdict(list)
        for number, file in enumerate(self._files):
            for key in file.keys():  # noqa: SIM118 - not a dict
                quantity, name, start = key.split("/")
                if quantity != BUFFER and len(file.get_slice(key).get_shape()) != 1:
                    raise ValueError(f"{key} is no stretch of a flattened tensor")
                self._stretches[quantity, name].append((int(start), number, key))
        for pieces in self._stretches.values():
            pieces.sort()

    def names(self, quantity: str) -> list[str]:
        """Of the tensors that have this quantity."""
        return [name for have, name in self._stretches if have == quantity]

    def stretches(self, quantity: str) -> dict[str, list[tuple[int, int]]]:
        """Where a quantity's stretches lie, ascending: name -> (first number, how many). Reads headers only."""
        found = {}
        for (have, name), pieces in self._stretches.items():
            if have == quantity:
                sizes = (self._files[number].get_slice(key).get_shape() for _, number, key in pieces)
                found[name] = [(start, math.prod(shape)) for (start, _, _), shape in zip(pieces, sizes)]
        return found

    def read(self, quantity: str, name: str, start: int, count: int) -> Tensor:
        """Numbers ``start`` to ``start + count`` of a flattened tensor.

        Returns:
            (count,)

        Raises:
            KeyError: some of them are in no file.
        """
        pieces = self._stretches.get((quantity, name), [])
        found, at = [], start
        first = max(0, bisect_right([piece[0] for piece in pieces], start) - 1)
        for piece_start, number, key in pieces[first:]:
            stored = self._files[number].get_slice(key)
            (length,) = stored.get_shape()
            if not piece_start <= at < piece_start + length or at == start + count:
                break
            piece = stored[at - piece_start : min(start + count - piece_start, length)]
            found.append(piece)
            at += len(piece)
        if at != start + count:
            raise KeyError(f"{quantity} of {name}: {start} to {start + count}, present to {at}")
        return found[0] if len(found) == 1 else torch.cat(found)

    def read_buffer(self, name: str) -> Tensor:
        """A buffer, whole.

        Raises:
            KeyError: it is in no file.
        """
        if (BUFFER, name) not in self._stretches:
            raise KeyError(f"the buffer {name}")
        ((_, number, key),) = self._stretches[BUFFER, name]
        return self._files[number].get_tensor(key)
