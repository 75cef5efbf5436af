"""The lock on a place of a store: one owner at a time, whatever dies or does not answer."""

from __future__ import annotations

import logging
import time

import pytest

pytest.importorskip("obstore", reason="needs the extra `remote`")

from pipeline.errors import UserError
from pipeline.stores import lock
from pipeline.stores.lock import LockLost, StoreLock
from pipeline.stores.place import RemotePath
from pipeline.stores.store import Store
from support.http_proxy import Fault, HttpProxy, Request
from support.stores import BUCKET, s3_server


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"BEAT": 0.1, "STALE": 1.5, "_POLL": 0.05}.items():
        monkeypatch.setattr(lock, name, seconds)


def test_one_owner_at_a_time(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against two machines that write one run, a dead owner that keeps it for ever, and one that comes back unaware."""
    cut = False

    def lose_the_answer(request: Request) -> Fault | None:
        return Fault(cut_after=0) if cut and request.method == "PUT" and request.number % 2 else None

    with s3_server(monkeypatch) as port, HttpProxy(port, 0, lose_the_answer) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        place = RemotePath(f"s3://{BUCKET}/lock")
        first, second, third = (StoreLock(place, ".lock", {"pid": n, "host": "h"}, f"machine {n}") for n in (1, 2, 3))
        caplog.set_level(logging.INFO, "pipeline")
        first.take()
        with pytest.raises(UserError, match=f"^{place} is being trained by process 1 on h "):
            second.take()
        cut = True
        for _ in range(4):
            first.renew()  # what was written, and whose answer was lost, is its own
        cut = False
        first.release()
        caplog.clear()
        second.take()
        assert "waiting" not in caplog.text  # nobody waits for an owner that has released it

        second._over.set()  # killed
        second._thread.join()
        began = time.monotonic()
        third.take()
        assert "was written by process 2 on h" in caplog.text and time.monotonic() - began >= lock.STALE
        with pytest.raises(LockLost, match=f"^{place} was taken over by process 3 on h .*, as this run could not reach it"):
            second.renew()
        again = StoreLock(place, ".lock", {"pid": 4}, "machine 3")  # of the same machine and folder, whose own lock it has
        began = time.monotonic()
        again.take()
        assert time.monotonic() - began < lock.STALE
        again.release()
        third._over.set()
        assert bytes(Store(place, "").fetch(".lock").data) == b"null\n"
