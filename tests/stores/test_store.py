"""A web server that lies: it costs neither memory nor hours, and what it does is one sentence."""

from __future__ import annotations

import re
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("obstore", reason="needs the extra `remote`")

from pipeline.errors import UserError
from pipeline.shards.shard_set import ShardSet
from pipeline.stores import opening, store
from pipeline.stores.place import RemotePath
from pipeline.stores.store import Store


@contextmanager
def server(answer: Callable[[BaseHTTPRequestHandler, int, int], None]) -> Iterator[str]:
    """A web server that answers requests for the bytes [begin, end) of a file; gives its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:  # noqa: N802 (the name that http.server asks for)
            first, last = map(int, re.findall(r"\d+", self.headers["range"] or "0 0"))
            try:
                answer(self, first, last + 1)
            except ConnectionError:
                self.close_connection = True

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{running.server_port}"
    finally:
        running.shutdown()
        running.server_close()


def begin_answer(handler: BaseHTTPRequestHandler, begin: int, end: int, size: int, sent: int | None = None) -> None:
    """The head of an answer about bytes of a file of ``size``, with a body of ``sent``; by default what was asked for."""
    handler.send_response(206)
    handler.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
    handler.send_header("Content-Length", str(end - begin if sent is None else sent))
    handler.end_headers()


def test_a_size_that_cannot_be_is_refused_at_once(tmp_path: Path) -> None:
    """Guards against gigabytes for the list of the parts of a manifest of 10^15 bytes, and against a disk that fills with it."""

    def claim(handler: BaseHTTPRequestHandler, begin: int, end: int) -> None:
        begin_answer(handler, begin, end, 10**15)
        handler.wfile.write(bytes(end - begin))

    with server(claim) as url:
        tracemalloc.start()
        with pytest.raises(UserError, match=r"/set/manifest.json cannot be read \(it has 1,000,000,000,000,000 bytes"):
            ShardSet(f"{url}/set", "train")
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
        tracemalloc.stop()
        with open(tmp_path / "file", "wb") as file:
            with pytest.raises(OSError, match="it has 1,000,000,000,000,000 bytes by the store, more than 5,000"):
                Store(RemotePath(url), "probe").download("table", file.fileno(), 5000)
            with pytest.raises(OSError, match="it has 1,000,000,000,000,000 bytes by the store, more than"):
                Store(RemotePath(url), "probe").download("table", file.fileno())


def test_no_more_is_read_than_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a body of any length in memory, where 100 kB were asked for."""
    passed = []

    def send_more(handler: BaseHTTPRequestHandler, begin: int, end: int) -> None:
        begin_answer(handler, begin, end, 10**6, sent=end - begin if "probe" in handler.path else 1 << 30)
        handler.wfile.write(bytes(end - begin))
        while "probe" not in handler.path:
            handler.wfile.write(bytes(1 << 20))
            passed.append(1 << 20)

    monkeypatch.setattr(store, "_TRIES", 1)
    with server(send_more) as url, pytest.raises(OSError, match=r"\d+ of 100000 bytes were sent"):
        Store(RemotePath(url), "probe").read("image", 0, 100_000)
    assert sum(passed) < 64 << 20  # what sockets hold, in two tries


def test_an_answer_that_trickles_is_given_up_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a quarter of an hour for one image, without a word, where each byte comes before the client loses patience."""
    requests: list[str] = []

    def trickle(handler: BaseHTTPRequestHandler, begin: int, end: int) -> None:
        requests.append(handler.path)
        begin_answer(handler, begin, end, 10**6)
        for _ in range(end - begin):
            handler.wfile.write(b"x")
            if "probe" not in handler.path and over.wait(0.05):
                return

    over = threading.Event()
    monkeypatch.setattr(opening, "_WHOLE", timedelta(seconds=0.5))
    monkeypatch.setattr(store, "_SLOW", 0.4)
    with server(trickle) as url:
        with pytest.raises(OSError, match=f"the answer was cut off, for .* s: '{url}/image'"):
            Store(RemotePath(url), "probe").read("image", 0, 100_000)
        over.set()
    assert requests.count("/image") == 2
    assert f"{url}/image is tried a last time (the answer was cut off): the store answers for others" in caplog.text


def test_another_host_is_named_once_and_gets_no_credentials(
    copied_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a password that follows a redirect, and against a set from elsewhere without a word."""
    asked: dict[str, list[str | None]] = {"first": [], "other": []}

    def give(handler: BaseHTTPRequestHandler, begin: int, end: int) -> None:
        asked["other"].append(handler.headers["authorization"])
        content = (copied_shards / handler.path.rpartition("/")[2]).read_bytes()
        part = content[begin:end]
        begin_answer(handler, begin, begin + len(part), len(content))
        handler.wfile.write(part)

    def send_on(handler: BaseHTTPRequestHandler, begin: int, end: int) -> None:
        asked["first"].append(handler.headers["authorization"])
        handler.send_response(302)
        handler.send_header("Location", f"{elsewhere}{handler.path}")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with server(give) as elsewhere, server(send_on) as url:
        for split in ("train", "val"):
            assert ShardSet(f"{url}/set", split).read(0).size
    assert len(asked["first"]) >= 4 and all(asked["first"]), "the server that was named gets them"
    assert len(asked["other"]) >= 4 and not any(asked["other"])
    host, other = (each.removeprefix("http://") for each in (url, elsewhere))
    assert caplog.messages == [f"{host} redirects to {other}, which gets no credentials: check that you trust it"]


def test_a_clock_that_is_off_is_waited_for_and_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against "renew the credentials", and the end of a run, where a clock has jumped: S3 signs the time of a request, and refuses
    one that is more than 15 minutes off."""
    monkeypatch.setattr(store, "_WARN_AFTER", 0.2)
    monkeypatch.setattr(store, "_FIRST_PATIENCE", 1.0)
    right, code = threading.Event(), b"<Error><Code>RequestTimeTooSkewed</Code></Error>"

    def refuse(handler: BaseHTTPRequestHandler, begin: int, end: int) -> None:
        if right.is_set():
            begin_answer(handler, begin, end, 10)
            handler.wfile.write(bytes(end - begin))
            return
        handler.send_response(403)
        handler.send_header("Content-Length", str(len(code)))
        handler.end_headers()
        handler.wfile.write(code)
        if caplog.messages:
            right.set()

    said = r"/set has not answered for \d+ s \(this machine's clock is not the store's\)"
    with server(refuse) as url:
        assert bytes(Store(RemotePath(f"{url}/set"), "probe").read("image", 0, 10).data) == bytes(10)
        (warned,) = caplog.messages
        assert re.fullmatch(re.escape(url) + said + "; it is tried again, for 1 s", warned)
        caplog.clear()
        right.clear()
        monkeypatch.setattr(store, "_WARN_AFTER", 60.0)
        with pytest.raises(UserError, match=said + ": check the store and network") as error:
            Store(RemotePath(f"{url}/set"), "probe").read("image", 0, 10)
        assert error.value.exit_code == 76
