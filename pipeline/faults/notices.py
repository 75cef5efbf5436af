"""What the processes write for each other into the job's store, and what of it counts: signed notes alone.

Anyone who reaches the store can write into it and delete from it. So a note without the job's signature, an older one that is
shown again, or none where one was, is not read: it is named once, the last good one stands, and whose it is writes it again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeVar

import torch.distributed as dist

from pipeline.faults.lost_ranks import Sign, Verdict
from pipeline.faults.signing import printable, seal, unseal

Note = TypeVar("Note", Sign, Verdict)
_VERDICT = "heartbeat/verdict"
_SIGN_OF_LIFE, _LAST_WORD = "sign of life", "verdict"  # purposes of a signature
_SHOWN = 60  # characters of a forged note


class Notices:
    """The signs of life and the verdict.

    Args:
        store: a connection of this object's own.
        secret: the job's.
        rank: of this process; rank 0 alone names what is forged, and writes the verdict.
    """

    def __init__(self, store: dist.TCPStore, secret: bytes, rank: int) -> None:
        self._store, self._secret, self._rank = store, secret, rank
        self._signs: dict[int, Sign] = {0: Sign(0, os.environ["MASTER_ADDR"])}  # the last good one of each
        self._own: dict[str, bytes] = {_VERDICT: b""} if rank == 0 else {}  # what stands under this process's keys
        self._named: set[str] = set()

    def write_sign(self, sign: Sign) -> None:
        self._write(_key(sign.rank), seal(self._secret, _SIGN_OF_LIFE, _key(sign.rank), sign.to_json()))

    def write_verdict(self, verdict: Verdict) -> None:
        self._write(_VERDICT, seal(self._secret, _LAST_WORD, _VERDICT, verdict.to_json()))

    def wait_until_written(self) -> None:
        """Until what was written has arrived."""
        self._store.check([_VERDICT])

    def read(self, ranks: Sequence[int]) -> tuple[list[Sign], Verdict | None]:
        """The newest good sign of each, one with beat 0 of who has written none; and the verdict, if there is one.

        Raises:
            RuntimeError: the store does not answer.
        """
        keys = [_VERDICT, *map(_key, ranks)]
        if not self._store.check(keys):  # multi_get would wait for a key that is not there yet, or was deleted
            for key in keys:
                self._store.compare_set(key, "", "")
        verdict, *signs = self._store.multi_get(keys)
        for key, note in zip(keys, (verdict, *signs), strict=True):
            if self._own.get(key, note) != note:
                self._name(key, note)
                self._store.set(key, self._own[key])
        last_word = _parse(Verdict, unseal(self._secret, _LAST_WORD, _VERDICT, verdict))
        return [self._read_sign(rank, note) for rank, note in zip(ranks, signs, strict=True)], last_word

    def _write(self, key: str, note: str) -> None:
        self._own[key] = note.encode()
        self._store.set(key, note)

    def _read_sign(self, rank: int, note: bytes) -> Sign:
        last = self._signs.setdefault(rank, Sign(rank))
        content = unseal(self._secret, _SIGN_OF_LIFE, _key(rank), note)
        sign = _parse(Sign, content)
        if sign and sign.beat >= last.beat:
            self._signs[rank] = sign
        elif note or last.beat:
            self._name(_key(rank), note)
        return self._signs[rank]

    def _name(self, key: str, note: bytes) -> None:
        if self._rank != 0 or key in self._named:
            return
        self._named.add(key)
        found = printable(note[: 4 * _SHOWN].decode(errors="replace"), _SHOWN) if note else "nothing"
        sentence = (
            f"warning: {key} in the job's store at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} was changed by somebody who is not of "
            f"this job (found: {found}), a note signed now by its own process needed: it is ignored; see the repository's docs/security.md for how to keep "
            f"strangers from that port."
        )
        with suppress(OSError):  # the terminal may be gone
            os.write(2, f"{sentence}\n".encode())  # the main thread may hold the lock of sys.stderr


def _parse(kind: type[Note], content: str | None) -> Note | None:
    try:
        return kind.from_json(content) if content else None
    except (ValueError, RecursionError):  # of another version of the pipeline
        return None


def _key(rank: int) -> str:
    return f"heartbeat/{rank}"
