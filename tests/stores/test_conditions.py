"""Writing under a condition: what keeps two processes apart that change the same object."""

from __future__ import annotations

import pytest

pytest.importorskip("obstore", reason="needs the extra `remote`")

from pipeline.stores.client import Version
from pipeline.stores.place import RemotePath
from pipeline.stores.store import Store
from support.http_proxy import Fault, HttpProxy, Request
from support.stores import BUCKET, s3_server


def test_an_object_is_replaced_only_in_the_state_that_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against two jobs of which each removes what the other has written, and against a store that knows no conditions."""
    simple = False

    def knows_no_conditions(request: Request) -> Fault | None:
        return Fault(status=501) if simple and "if-none-match" in request.headers.lower() else None

    with s3_server(monkeypatch) as port, HttpProxy(port, 0, knows_no_conditions) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        place = RemotePath(f"s3://{BUCKET}/a")
        store = Store(place, probe="")
        nothing = Version()
        first = store.put("x", b"first", replaces=nothing)
        with pytest.raises(FileExistsError):
            store.put("x", b"other", replaces=nothing)
        second = store.put("x", b"second", "mark", replaces=first)
        with pytest.raises(FileExistsError):
            store.put("x", b"other", replaces=first)
        assert (bytes(store.fetch("x").data), store.fetch("x").version, store.describe("x")) == (b"second", second, (6, "mark"))
        store.delete(["x", "absent"])
        assert store.objects() == {}
        simple = True
        store.put("x", b"third", replaces=nothing)
        assert store.objects() == {"x": (5, store.fetch("x").version.tag)}
