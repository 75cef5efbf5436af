"""Find the job's key-value store, which rank 0 hosts, and the job's secret, whether the launcher gives them or not.

torchrun's agent keeps a store of its own at MASTER_ADDR:MASTER_PORT. It listens on all addresses, and outlives the ranks, so that a
restart would read what the ranks before have written: it only tells ranks on other nodes the port of rank 0's store.

On one machine, port and secret go from rank 0 to the others through a Unix socket in Linux's abstract namespace: the kernel says which
user is at its other end, no other machine reaches it, and unlike a file it is gone when a start is killed.
"""

import contextlib
import errno
import hashlib
import logging
import os
import re
import secrets
import socket
import struct
import time
from datetime import timedelta

import torch.distributed as dist

from pipeline.cluster.environment import SECRET, START_WITH, is_loopback, job_secret
from pipeline.errors import NotConnected

_RESOLVE_TIMEOUT = 10.0  # seconds of retries while the name service answers "try again", as it does when a job has just started
_PROBE_TIMEOUT = 10.0  # seconds for one TCP connection to rank 0's node; a firewall that drops packets answers nothing at all
_BACKLOG = 2048  # pending connections: all ranks of a large job connect at the same moment
# Key of the job's store: what rank 0 has drawn. Of the agent's: the port of the job's store, and a key that only this start's store has.
_SECRET, _PLACE, _A_PLACE = "secret", "pervit/place", re.compile("([0-9]{1,5}) ([0-9a-f]{16})")
_log = logging.getLogger(__name__)


def meet(rank: int, size: int, timeout: timedelta, on_one_machine: bool) -> tuple[dist.TCPStore, bytes]:
    """The job's store, at MASTER_ADDR:MASTER_PORT from now on, and the job's secret, which rank 0 draws if no launcher has. Collective.
    Raises UserError: a secret is malformed, or only some ranks have it; NotConnected: a rank could not be reached within ``timeout``."""
    secret, seconds, agent = os.environ.get(SECRET), timeout.total_seconds(), None
    job = f"{os.geteuid()} {os.environ['MASTER_PORT']} {os.environ.get('TORCHELASTIC_RUN_ID')}"
    name = f"\0pervit-{hashlib.sha256(job.encode()).hexdigest()[:32]}"
    if by_agent := os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", "") == "True":
        agent = None if on_one_machine else _reach_store(rank, seconds)
        os.environ["MASTER_PORT"] = "0"
    drawn = secrets.token_hex(32) if secret is None else ""
    job_secret(secret or drawn)  # before anybody waits
    by_socket = on_one_machine and bool(by_agent or drawn)
    if rank > 0:
        if by_socket:
            os.environ["MASTER_PORT"], secret = _ask(name, rank, seconds).split()
        store = _reach_store(rank, seconds, agent)
        return store, job_secret(secret or store.get(_SECRET).decode(errors="replace"))
    store, mark = _host_store(size, timeout), secrets.token_hex(8)
    os.environ["MASTER_PORT"] = port = str(store.port)
    lacks = "torchrun's store listens on all addresses, whoever reaches it can stop or restart this run; " if by_agent else ""
    if drawn and not on_one_machine:
        lacks += f"without {SECRET}, whoever reaches {os.environ['MASTER_ADDR']}:{port} can join it as a rank; "
    if lacks:
        _log.info(f"note: {lacks}see the repository's docs/security.md")
    store.set(mark, "")
    store.set(_SECRET, "" if on_one_machine else drawn)
    if agent:
        agent.set(_PLACE, f"{port} {mark}")
    if by_socket:
        _give(name, f"{port} {secret or drawn}", size - 1, seconds)
    return store, job_secret(secret or drawn)


def _give(name: str, text: str, others: int, timeout: float) -> None:
    """Rank 0: wait until so many processes of this user have asked at the socket, and answer each."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(timeout)
        try:
            listener.bind(name)
            listener.listen(_BACKLOG)
            while others:
                with listener.accept()[0] as asking:
                    if _is_own(asking):
                        asking.sendall(text.encode())
                        others -= 1
        except OSError as error:
            problem = f"rank 0 waited in vain for {others} of the other ranks on this machine ({error.strerror or error})"
            raise NotConnected(problem, "see in their logs why they did not start") from None


def _ask(name: str, rank: int, timeout: float) -> str:
    """Other ranks: what rank 0, which may still be starting, answers at the socket."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(timeout)
            asking.connect(name)
            if _is_own(asking) and (text := asking.makefile().read()):
                return text
        time.sleep(0.1)
    problem = f"rank {rank} found no rank 0 on this machine for {timeout:.0f} s"
    raise NotConnected(problem, "see in its log why it did not start")


def _is_own(connection: socket.socket) -> bool:
    """Whether a process of this user is at the other end: the middle of struct ucred in unix(7)."""
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1] == os.geteuid()


def store_client(timeout: float) -> dist.TCPStore:
    """Open another connection to the job's store; each request may take ``timeout`` seconds."""
    return dist.TCPStore(*_meeting_point(), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout))


def _meeting_point() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def _host_store(size: int, timeout: timedelta) -> dist.TCPStore:
    address, port = _meeting_point()
    try:
        listener = _listen(address, port)
    except OSError as error:
        problem = f"rank 0 cannot listen at MASTER_ADDR:MASTER_PORT {address}:{port} ({os.strerror(error.errno or 0)})"
        raise NotConnected(problem, "start again, or set MASTER_PORT to a free port") from None
    descriptor = listener.detach()
    return dist.TCPStore(address, port, size, True, timeout, wait_for_workers=False, master_listen_fd=descriptor)


def _listen(address: str, port: int) -> socket.socket:
    """Listen on loopback, or on all interfaces: which of its addresses other nodes use is unknown here."""
    family, _, _, _, place = _resolve(address, port)
    if is_loopback(address):
        return socket.create_server(place[:2], family=family, backlog=_BACKLOG)
    try:
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise
        return socket.create_server(("", port), backlog=_BACKLOG)  # a machine without IPv6


def _reach_store(rank: int, timeout: float, agent: dist.TCPStore | None = None) -> dist.TCPStore:
    """Connect to rank 0, which may still be starting. The ``agent``'s store names its port, or still that of the start before."""
    deadline, mark = time.monotonic() + timeout, ""
    while True:
        if agent and agent.check([_PLACE]) and (found := _A_PLACE.fullmatch(agent.get(_PLACE).decode(errors="replace"))):
            os.environ["MASTER_PORT"], mark = found.groups()
        address, port = _meeting_point()
        family, kind, protocol, _, place = _resolve(address, port)
        try:
            with socket.socket(family, kind, protocol) as probe:  # the store's own attempts would print C++ tracebacks
                probe.settimeout(_PROBE_TIMEOUT)
                probe.connect(place)
            store = store_client(timeout)
            if not mark or store.check([mark]) and store.add(f"{mark} {rank}", 1) == 1:
                return store
            raise OSError("of the start before")  # which still lives if torchrun's nodes restart without waiting for each other
        except (OSError, dist.DistNetworkError) as error:
            if time.monotonic() > deadline:
                reason = (error.strerror or "no answer") if isinstance(error, OSError) else "no answer"
                where = f"at MASTER_ADDR:MASTER_PORT {address}:{port} for {timeout:.0f} s ({reason}), where rank 0 must listen"
                remedy = "check whether it has started (its log) and whether a firewall stands between the nodes"
                raise NotConnected(f"rank {rank} found nobody {where}", remedy) from None
            time.sleep(0.2)  # rank 0 may still be starting; thousands of ranks may ask


def _resolve(address: str, port: int) -> tuple:
    deadline = time.monotonic() + _RESOLVE_TIMEOUT
    while True:
        try:
            found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
            return min(found, key=lambda entry: entry[0] != socket.AF_INET)  # as the store does, which listens on both
        except (OSError, UnicodeError) as error:
            if getattr(error, "errno", None) != socket.EAI_AGAIN or time.monotonic() > deadline:
                reason = getattr(error, "strerror", None) or error
                got = f"got {address!r}, which cannot be found ({reason})"
                problem = f"MASTER_ADDR must be a host name or address of rank 0's node, {got}"
                raise NotConnected(problem, f"{START_WITH}, or correct it") from None
            time.sleep(1)  # EAI_AGAIN: the name service asks for a retry
