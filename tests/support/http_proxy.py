"""A proxy on 127.0.0.1 between a client and a server: delays every answer, and gives wrong ones where a test asks for it.

``python tests/support/http_proxy.py UPSTREAM_PORT MILLISECONDS`` runs one as a process of its own and prints its port.
"""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

_PIECE = 1 << 18
_LONGEST_HEAD = 1 << 16


@dataclass(frozen=True)
class Request:
    """What a fault may depend on."""

    number: int  # from 0, over all connections
    method: str
    path: str
    headers: str


@dataclass(frozen=True)
class Fault:
    """What the proxy does instead of passing on the answer.

    Attributes:
        delay: seconds before the answer.
        status: answer with this status, and with ``headers``.
        headers: such as ``{"Retry-After": "1"}``.
        cut_after: close the connection after so many bytes of the body.
        short_by: a complete answer that lacks so many bytes of the body at its end.
        flip: change the body's last byte.
        lose: pass on a request that lacks so many bytes of its body, as if that were all.
    """

    delay: float = 0.0
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    cut_after: int | None = None
    short_by: int = 0
    flip: bool = False
    lose: int = 0


class HttpProxy:
    """Runs in a thread until it is closed.

    Args:
        port: of the server on 127.0.0.1.
        delay: seconds before each answer.
        fault: decides on the fault of a request, None for none.

    Attributes:
        port: of the proxy.
        requests: all so far.
        faults: those that a fault was given to.
    """

    def __init__(self, port: int, delay: float = 0.0, fault: Callable[[Request], Fault | None] = lambda _: None) -> None:
        self._upstream, self.delay, self.fault = port, delay, fault
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0, limit=_LONGEST_HEAD * 8))
        self.port: int = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        def end() -> None:
            self._server.close()
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.call_later(0.05, self._loop.stop)

        self._loop.call_soon_threadsafe(end)
        self._thread.join(10)

    def __enter__(self) -> HttpProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                method, path = head.split(b" ", 2)[:2]
                request = Request(len(self.requests), method.decode(), path.decode(), head.decode("latin-1"))
                self.requests.append(request)
                body = await reader.readexactly(_length(head))
                fault = self.fault(request) or Fault()
                if fault != Fault():
                    self.faults.append(fault)
                if self.delay or fault.delay:
                    await asyncio.sleep(self.delay + fault.delay)
                if fault.status:
                    extra = "".join(f"{name}: {value}\r\n" for name, value in fault.headers.items())
                    writer.write(f"HTTP/1.1 {fault.status} Fault\r\nContent-Length: 0\r\n{extra}\r\n".encode())
                    await writer.drain()
                    continue
                if upstream is None:
                    upstream = await asyncio.open_connection("127.0.0.1", self._upstream, limit=_LONGEST_HEAD * 8)
                if fault.lose:
                    body = body[: max(0, len(body) - fault.lose)]
                    head = re.sub(rb"(?i)(content-length:\s*)\d+", b"\\g<1>%d" % len(body), head)
                upstream[1].write(head + body)
                if await self._answer(upstream[0], writer, fault, method == b"HEAD"):
                    upstream[1].close()
                    upstream = None
                if fault.cut_after is not None:
                    writer.transport.abort()
                    return
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            if upstream:
                upstream[1].close()

    async def _answer(self, upstream: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: Fault, bodiless: bool) -> bool:
        """Pass on one answer; returns whether the server closes the connection."""
        head = await upstream.readuntil(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        length = 0 if bodiless or status in (204, 304) else _length(head)
        sent = head
        if fault.short_by:
            sent = re.sub(rb"(?i)(content-length:\s*)\d+", b"\\g<1>%d" % max(0, length - fault.short_by), head)
        writer.write(sent)
        left, passed = length, 0
        limit = max(0, length - fault.short_by) if fault.cut_after is None else min(length, fault.cut_after)
        while left:
            piece = await upstream.readexactly(min(left, _PIECE))
            left -= len(piece)
            if fault.flip and not left:
                piece = piece[:-1] + bytes([piece[-1] ^ 1])
            writer.write(piece[: max(0, limit - passed)])
            passed += len(piece)
            await writer.drain()
        await writer.drain()
        return b"connection: close" in head.lower() or head.startswith(b"HTTP/1.0")


def _length(head: bytes) -> int:
    found = re.search(rb"(?i)\r\ncontent-length:\s*(\d+)", head)
    return int(found[1]) if found else 0


def main() -> None:
    proxy = HttpProxy(int(sys.argv[1]), float(sys.argv[2]) / 1e3)
    print(proxy.port, flush=True)
    sys.stdin.read()  # until its parent ends


if __name__ == "__main__":
    main()
