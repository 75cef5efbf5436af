"""Heartbeats in groups: what rank 0 reads of them, and what it does without a leader. A real store, no processes."""

from __future__ import annotations

import secrets
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from pipeline.config import DistributedConfig
from pipeline.faults.lost_ranks import Digest, Judge, Sign, Status
from pipeline.faults.notices import Notices
from pipeline.faults.relay import Relay

SIZE, GROUP = 10, 4  # the leaders are 4 and 8


class Counted:
    """A store's client that counts the keys of its requests."""

    def __init__(self, store: dist.TCPStore) -> None:
        self._store, self.keys = store, 0

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.keys += len(keys)
        return self._store.multi_get(keys)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class Job:
    """All ranks of a job, each of which beats when it is told to."""

    def __init__(self) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
        self.secret = secrets.token_bytes(32)
        self.counted = Counted(self.store)
        self.notices = [Notices(self.counted if rank == 0 else self.store, self.secret, rank) for rank in range(SIZE)]
        self.relays = [Relay(notices, rank, SIZE, GROUP) for rank, notices in enumerate(self.notices)]
        self.beats = [0] * SIZE

    def beat(self, *silent: int, **fields: Any) -> list[Sign]:
        """A beat of all but some ranks, and what rank 0 reads then. ``fields``: of rank 6's sign."""
        for rank in reversed(range(SIZE)):  # members before their leader
            if rank not in silent:
                self.beats[rank] += 1
                self.notices[rank].write_sign(Sign(rank, beat=self.beats[rank], **(fields if rank == 6 else {})))
                self.relays[rank].pass_on(self.beats[rank])
        self.counted.keys = 0
        return self.relays[0].read()


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    job = Job()
    monkeypatch.setenv("MASTER_PORT", str(job.store.port))
    return job


def beats(signs: list[Sign]) -> list[int]:
    return [sign.beat for sign in signs]


def test_rank_0_reads_its_own_group_and_a_message_of_each_other(job: Job) -> None:
    """Guards against a load of rank 0 that grows with every rank."""
    assert beats(job.beat(5)) == [1, 1, 1, 1, 1, 0, 1, 1, 1, 1]  # rank 5 has not begun
    for beat in (2, 3):
        signs = job.beat()
        assert [sign.rank for sign in signs] == list(range(SIZE))
        assert beats(signs) == [beat - (rank == 5) for rank in range(SIZE)]
    assert job.counted.keys == 2 + 1 + GROUP  # two digests, the verdict, its group


def test_members_of_a_lost_leader_are_not_silent(job: Job) -> None:
    """Guards against 64 ranks that count as lost because one is, and against a leader that nobody misses."""
    judge = Judge(DistributedConfig(silence_timeout=5, progress_timeout=60))
    verdicts = []
    for _ in range(4):
        judge.observe(job.beat(), 1)
    for _ in range(8):
        judge.observe(signs := job.beat(4), 1)
        verdicts.append(judge.verdict())
    assert max(beats(signs)) - min(sign.beat for sign in signs if sign.rank != 4) == 0
    assert [verdict is not None for verdict in verdicts] == [False] * 4 + [True] * 4
    assert verdicts[4].sentence.startswith("rank 4 (") and "and so did" not in verdicts[4].sentence
    job.beat()
    assert beats(job.beat())[5:8] == [14, 14, 14]  # the leader was only suspended
    assert job.counted.keys == 2 + 1 + GROUP


def test_last_words_come_in_full(job: Job) -> None:
    """Guards against an error message that a digest cuts, or that makes it too long to be read."""
    job.beat()
    words = "x" * 2000
    sign = job.beat(status=Status.ENDED, words=words, exit_code=2)[6]
    assert (sign.status, sign.words, sign.exit_code) == (Status.ENDED, words, 2)
    signs = tuple(Sign(rank, "h" * 250, beat=3, doing="d" * 100) for rank in range(300))
    job.notices[4].write_digest(Digest(4, 99, signs))
    assert job.notices[0].read_digests([4]) == [Digest(4, 99)]  # without signs: rank 0 reads them itself


def test_only_signed_and_newer_digests_count(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    """Guards against a stranger who speaks for a whole group, and against his hiding that one of it is lost."""
    job.beat()
    key = "heartbeat/digest/4"
    old = job.store.get(key)
    now = job.beat()
    liar = Notices(job.store, secrets.token_bytes(32), 4)
    lie = Digest(4, 50, tuple(Sign(rank, beat=50) for rank in range(4, 8)))
    liar.write_digest(lie)
    forged = job.store.get(key)
    elsewhere = job.store.get("heartbeat/digest/8")
    for note in (forged, old, elsewhere, job.store.get("heartbeat/5"), b"", b"\xff" * 100_000, b"[]"):
        job.store.set(key, note)
        assert job.relays[0].read() == now
    job.store.delete_key(key)
    assert job.relays[0].read() == now
    assert capfd.readouterr().err.count(f"warning: {key} in the job's store") == 1
    job.store.set("heartbeat/6", "nonsense")
    job.relays[4].pass_on(9)
    assert capfd.readouterr().err.count("warning: heartbeat/6 in the job's store") == 1  # its leader sees it
    assert beats(job.beat()) == [3] * SIZE


@pytest.mark.parametrize("text", ["[]", "7", "[4, 1]", '[4, "1", []]', "[4, 1, [7]]", "[4, 1, [[7]]]", "[4, 1, {}, 0]"])
def test_other_digests_are_refused(text: str) -> None:
    """Guards against a traceback in the heartbeat's thread over a message of another version."""
    with pytest.raises(ValueError):
        Digest.from_json(text)
    row = [*Sign(5, beat=1)]
    assert Digest.from_json(Digest(4, 1, (Sign._make(row),)).to_json()) == Digest(4, 1, (Sign(5, beat=1),))
