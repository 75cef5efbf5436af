"""What is in a checkpoint's files, by their headers: read by one rank each, and told to the others in few bytes.

At a thousand ranks a checkpoint has a thousand files. If every rank opened each of them at a start, that would be a million requests
to the file system's metadata server; so each rank looks at its share of the files and opens only those that hold what it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_DOT = "/"  # between the parts of a slice's key


class Entry(NamedTuple):
    """A tensor of a file."""

    key: str  # QUANTITY/NAME/START
    shape: list[int]
    dtype: str  # as safetensors calls it


Header = list[Entry]


def read_header(file: Any) -> Header:
    """The tensors of an open safetensors file. Reads its header only."""
    entries = []
    for key in file.keys():  # noqa: SIM118 - not a dict
        its = file.get_slice(key)
        entries.append(Entry(key, list(its.get_shape()), its.get_dtype()))
    return entries


def read_headers(folder: Path, names: Sequence[str]) -> dict[str, Header]:
    """The headers of some files of a checkpoint.

    Raises:
        safetensors.SafetensorError: a file is not a safetensors file.
        OSError: a file cannot be read.
    """
    from safetensors import safe_open  # imported late: commands that only look at a folder do not need it

    headers = {}
    for name in names:
        with safe_open(folder / name, framework="pt") as file:
            headers[name] = read_header(file)
    return headers


def packed(headers: Mapping[str, Header], parameters: Sequence[str]) -> dict[str, list]:
    """Headers as JSON of about 20 bytes a tensor.

    Args:
        headers: by file.
        parameters: names that are written as their numbers in this list.
    """
    number = {name: place for place, name in enumerate(parameters)}
    return {name: [_packed(entry, number) for entry in header] for name, header in headers.items()}


def unpacked(headers: Mapping[str, list], parameters: Sequence[str]) -> dict[str, Header]:
    """The opposite of :func:`packed`."""
    return {name: [_unpacked(entry, parameters) for entry in header] for name, header in headers.items()}


def _packed(entry: Entry, number: Mapping[str, int]) -> list:
    quantity, _, rest = entry.key.partition(_DOT)
    name, _, start = rest.rpartition(_DOT)
    if name in number and len(entry.shape) == 1 and start.isdecimal():
        return [quantity, number[name], int(start), entry.shape[0], entry.dtype]
    return list(entry)


def _unpacked(entry: list, parameters: Sequence[str]) -> Entry:
    if len(entry) == len(Entry._fields):
        return Entry(*entry)
    quantity, name, start, count, dtype = entry
    return Entry(_DOT.join((quantity, parameters[name], str(start))), [count], dtype)
