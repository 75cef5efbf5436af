"""Signed messages between the ranks, in the job's key-value store.

Whoever reaches the store can write to it and delete from it. So a message without a valid signature, a replayed one, or the
absence of one that was there, is reported once and otherwise ignored: the last valid message stands, and its owner writes it
again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeVar

import torch.distributed as dist

from pipeline.distributed.signing import LARGEST_NOTE, printable, seal, unseal
from pipeline.faults.lost_ranks import Digest, Sign, Verdict

Note = TypeVar("Note", Sign, Verdict, Digest)
Beating = TypeVar("Beating", Sign, Digest)
_VERDICT = "heartbeat/verdict"
_SIGN_OF_LIFE, _DIGEST, _LAST_WORD = "sign of life", "digest", "verdict"  # purposes of a signature
_SHOWN = 60  # characters of a forged message in the warning


class Notices:
    """Reads and writes heartbeats, digests of them, and the verdict.

    Args:
        store: a connection used by nothing else.
        secret: the job's.
        rank: of this process; rank 0 writes the verdict. It reports forgeries, a group's leader those of its group's signs.
    """

    def __init__(self, store: dist.TCPStore, secret: bytes, rank: int) -> None:
        self._store, self._secret, self._rank = store, secret, rank
        self._signs: dict[int, Sign] = {0: Sign(0, os.environ["MASTER_ADDR"])}  # the last valid one of each rank
        self._digests: dict[int, Digest] = {}  # and of each leader
        self._own: dict[str, bytes] = {_VERDICT: b""} if rank == 0 else {}  # what this rank has written under its keys
        self._named: set[str] = set()

    def write_sign(self, sign: Sign) -> None:
        self._write(_key(sign.rank), seal(self._secret, _SIGN_OF_LIFE, _key(sign.rank), sign.to_json()))

    def write_digest(self, digest: Digest) -> None:
        """Write what a group's leader has read, or an empty digest if that is too long for a message."""
        key = _digest_key(digest.leader)
        note = seal(self._secret, _DIGEST, key, digest.to_json())
        if len(note) > LARGEST_NOTE:
            note = seal(self._secret, _DIGEST, key, Digest(digest.leader, digest.beat).to_json())
        self._write(key, note)

    def write_verdict(self, verdict: Verdict) -> None:
        self._write(_VERDICT, seal(self._secret, _LAST_WORD, _VERDICT, verdict.to_json()))

    def wait_until_written(self) -> None:
        """Block until the store has processed what was written."""
        self._store.check([_VERDICT])

    def read(self, ranks: Sequence[int]) -> tuple[list[Sign], Verdict | None]:
        """The newest valid heartbeat of each rank, with beat 0 if it has sent none; and the verdict, if there is one.

        Raises:
            RuntimeError: the store does not answer.
        """
        verdict, *notes = self._fetch([_VERDICT, *map(_key, ranks)])
        last_word = _parse(Verdict, unseal(self._secret, _LAST_WORD, _VERDICT, verdict))
        return self._newest_signs(ranks, notes, report=self._rank == 0), last_word

    def read_members(self, ranks: Sequence[int]) -> list[Sign]:
        """As :meth:`read`, by the leader of their group."""
        return self._newest_signs(ranks, self._fetch([*map(_key, ranks)]), report=True)

    def read_digests(self, leaders: Sequence[int]) -> list[Digest]:
        """The newest valid digest of each leader, with beat 0 if it has sent none. The signs in it count as read.

        Raises:
            RuntimeError: the store does not answer.
        """
        keys = [*map(_digest_key, leaders)]
        found = []
        for leader, key, note in zip(leaders, keys, self._fetch(keys) if keys else [], strict=True):
            last = self._digests.setdefault(leader, Digest(leader))
            digest = self._newest(last, _parse(Digest, unseal(self._secret, _DIGEST, key, note)), key, note, report=True)
            if digest.beat > last.beat:
                self._digests[leader] = digest
                for sign in digest.signs:
                    if (known := self._signs.get(sign.rank)) is None or sign.beat > known.beat:
                        self._signs[sign.rank] = sign
            found.append(digest)
        return found

    def known(self, ranks: Sequence[int]) -> list[Sign]:
        """The newest valid heartbeat of each rank that was read so far, by itself or in a digest. Asks nobody."""
        return [self._signs.get(rank) or Sign(rank) for rank in ranks]

    def _fetch(self, keys: list[str]) -> list[bytes]:
        """What is under the keys, nothing under those that nobody has written; what was changed of this rank's own is written again."""
        if not self._store.check(keys):  # multi_get would block on a key that does not exist yet, or was deleted
            for key in keys:
                self._store.compare_set(key, "", "")
        notes: list[bytes] = self._store.multi_get(keys)
        for key, note in zip(keys, notes, strict=True):
            if self._own.get(key, note) != note:
                self._name(key, note, report=self._rank == 0)
                self._store.set(key, self._own[key])  # type: ignore[arg-type]  # it takes bytes too
        return notes

    def _write(self, key: str, note: str) -> None:
        self._own[key] = note.encode()
        self._store.set(key, note)

    def _newest_signs(self, ranks: Sequence[int], notes: list[bytes], report: bool) -> list[Sign]:
        for rank, note in zip(ranks, notes, strict=True):
            key, last = _key(rank), self._signs.setdefault(rank, Sign(rank))
            sign = _parse(Sign, unseal(self._secret, _SIGN_OF_LIFE, key, note)) if note else None
            self._signs[rank] = self._newest(last, sign, key, note, report)
        return [self._signs[rank] for rank in ranks]

    def _newest(self, last: Beating, read: Beating | None, key: str, note: bytes, report: bool) -> Beating:
        if read and read.beat >= last.beat:
            return read
        if note or last.beat:
            self._name(key, note, report)
        return last

    def _name(self, key: str, note: bytes, report: bool) -> None:
        if not report or key in self._named:
            return
        self._named.add(key)
        found = printable(note[: 4 * _SHOWN].decode(errors="replace"), _SHOWN) if note else "nothing"
        sentence = (
            f"warning: {key} in the job's store at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} was changed by somebody who is not of "
            f"this job (found: {found}), a note signed now by its own process needed: it is ignored; see the repository's docs/security.md for how to keep "
            f"strangers from that port."
        )
        with suppress(OSError):  # the terminal may be gone
            # Not through the logger: this is a thread, and a main thread that hangs may hold a lock of sys.stderr.
            os.write(2, f"{sentence}\n".encode())


def _parse(kind: type[Note], content: str | None) -> Note | None:
    try:
        return kind.from_json(content) if content else None
    except (ValueError, RecursionError):  # of another version of the pipeline
        return None


def _key(rank: int) -> str:
    return f"heartbeat/{rank}"


def _digest_key(leader: int) -> str:
    return f"heartbeat/digest/{leader}"
