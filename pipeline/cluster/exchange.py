"""Gather and broadcast plain data as JSON: unlike a pickle, a message that is received is parsed, never executed."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from pipeline.errors import UserError

# Bytes per rank and message. A run's own are a thousandth of it; a forged length must not exhaust the memory.
LARGEST = 64 << 20


def gather_json(value: object, size: int, device: torch.device) -> list:
    """All-gather ``value``, in rank order. Collective.

    Args:
        value: None, numbers, strings, and lists and dicts of them with strings as keys. Tuples arrive as lists.
        device: where the backend wants its tensors.

    Raises:
        UserError: on every rank: a message is not JSON, or larger than ``LARGEST``.
        TypeError: ``value`` is not such data.
    """
    _refuse_other_keys(value)
    own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = torch.zeros(size, 1, dtype=torch.int64, device=device)
    dist.all_gather(list(lengths), torch.tensor([len(own)], device=device))
    for rank, length in enumerate(lengths.flatten().tolist()):
        _check_length(rank, length)
    padded = torch.zeros(int(lengths.max()), dtype=torch.uint8, device=device)
    padded[: len(own)] = own.to(device)
    received = torch.zeros(size, len(padded), dtype=torch.uint8, device=device)
    dist.all_gather(list(received), padded)
    texts = received.cpu().numpy()  # at once: a copy for each rank would wait for the GPU thousands of times
    return [
        _read(text[:length].tobytes(), rank)
        for rank, (text, length) in enumerate(zip(texts, lengths.flatten().tolist(), strict=True))
    ]


def broadcast_json(value: object, rank: int, device: torch.device) -> Any:
    """Rank 0's ``value``, on every rank. Collective.

    Args:
        value: as for :func:`gather_json`; ignored on other ranks.
        device: where the backend wants its tensors.

    Raises:
        UserError: the message is not JSON, or larger than ``LARGEST``.
        TypeError: on rank 0: ``value`` is not such data.
    """
    own = torch.empty(0, dtype=torch.uint8)
    if rank == 0:
        _refuse_other_keys(value)
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    length = torch.tensor([len(own)], device=device)
    dist.broadcast(length, src=0)
    _check_length(0, int(length))
    message = own.to(device) if rank == 0 else torch.zeros(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(message, src=0)
    return _read(message.cpu().numpy().tobytes(), 0)


def _check_length(rank: int, length: int) -> None:
    if not 1 <= length <= LARGEST:
        raise UserError(
            f"a message must have 1 to {LARGEST} bytes, got one of {length} bytes from rank {rank}",
            "start again, and if it happens again see the repository's docs/security.md, somebody else may be writing to this port",
        )


def _read(text: bytes, rank: int) -> object:
    try:
        return json.loads(text.decode("ascii"))  # json.dumps writes nothing else
    except (ValueError, RecursionError):
        raise UserError(
            f"a message must be JSON, got {text[:20]!r}... from rank {rank}",
            "all ranks must run the same version; if they do, see the repository's docs/security.md, "
            "somebody else may be writing to this port",
        ) from None


def _refuse_other_keys(value: object) -> None:
    """JSON would silently turn a number that is a key into a string."""
    if isinstance(value, dict):
        wrong = [key for key in value if not isinstance(key, str)]
        if wrong:
            raise TypeError(f"keys must be strings, got {wrong[0]!r}")
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            _refuse_other_keys(part)


def printable(text: str, limit: int) -> str:
    """Text that is safe to print: control characters become "?", and it is cut to ``limit`` characters."""
    if len(text) <= limit and text.isprintable():
        return text
    kept = "".join(c if c.isprintable() else "?" for c in text[: limit + 1])
    return kept if len(kept) <= limit else kept[: limit - 3] + "..."
