"""This process's place in the job, and collectives on tensors and on plain data.

Plain data travels as JSON: unlike a pickle, a message that is received is parsed, never executed.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.errors import UserError

# Bytes per rank and message. A run's own are a thousandth of it; a forged length must not exhaust the memory.
LARGEST = 64 << 20
_STRANGER = "see the repository's docs/security.md, somebody else may be writing to this port"


@dataclass(frozen=True)
class World:
    """This process's place in the job, and the collectives that need no more than that.

    Plain data is None, numbers, strings, and lists and dicts of them with strings as keys; tuples arrive as lists. Collectives on
    it raise a ``TypeError`` for anything else, and a ``UserError`` for a message that is not JSON or larger than ``LARGEST``.
    :meth:`sum` and :meth:`gather` of a world of one need no process group: a library's user has none.
    """

    rank: int
    size: int
    device: torch.device
    cpu_threads: int  # this rank's share of the node's cores

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes logs and files."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""
        dist.barrier()

    def sum(self, values: Tensor) -> Tensor:
        """All-reduce: the sum over all ranks, in place, on the world's device. Collective."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def stack(self, values: Tensor) -> Tensor:
        """All-gather a tensor of the same shape on every rank, on the world's device: (size, *shape) in rank order. Collective."""
        gathered = values.new_empty(self.size, *values.shape)
        dist.all_gather(list(gathered), values)
        return gathered

    def gather(self, value: object) -> list:
        """All-gather plain data in rank order. Collective."""
        own = _encoded(value)
        if self.size == 1:
            _check_length(0, len(own))
            return [_decoded(own.numpy().tobytes(), 0)]
        lengths = self.stack(torch.tensor([len(own)], device=self.device)).flatten().tolist()
        for rank, length in enumerate(lengths):
            _check_length(rank, length)
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device=self.device)
        padded[: len(own)] = own.to(self.device)
        texts = self.stack(padded).cpu().numpy()  # at once: a copy for each rank would wait for the GPU thousands of times
        return [_decoded(text[:length].tobytes(), rank) for rank, (text, length) in enumerate(zip(texts, lengths))]

    def from_main(self, value: object) -> Any:
        """Broadcast plain data of rank 0; ``value`` is ignored on other ranks. Collective."""
        own = _encoded(value if self.is_main else None).to(self.device)
        length = torch.tensor([len(own)], device=self.device)
        dist.broadcast(length, src=0)
        _check_length(0, int(length))
        message = own if self.is_main else own.new_zeros(int(length))
        dist.broadcast(message, src=0)
        return _decoded(message.cpu().numpy().tobytes(), 0)


def _encoded(value: object) -> Tensor:
    _refuse_other_keys(value)
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


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


def _check_length(rank: int, length: int) -> None:
    if not 1 <= length <= LARGEST:
        problem = f"a message must have 1 to {LARGEST} bytes, got one of {length} bytes from rank {rank}"
        raise UserError(problem, f"start again, and if it happens again {_STRANGER}")


def _decoded(text: bytes, rank: int) -> object:
    try:
        return json.loads(text.decode("ascii"))  # json.dumps writes nothing else
    except (ValueError, RecursionError):
        problem = f"a message must be JSON, got {text[:20]!r}... from rank {rank}"
        raise UserError(problem, f"all ranks must run the same version; if they do, {_STRANGER}") from None


def name_ranks(ranks: Sequence[object]) -> str:
    """Several ranks in a message, the first eight by number: ``ranks 1, 2``."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
