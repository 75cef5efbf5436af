"""How the processes find each other and know that they belong together: one key-value store, kept by rank 0's process.

On one machine (MASTER_ADDR is a loopback address) nothing listens where another machine could reach it. On several nodes the store
and the connections of gloo and NCCL are open to the network between them: ``docs/security.md``.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import secrets
import socket
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from pipeline.errors import NotConnected, UserError
from pipeline.exchange import gather_json
from pipeline.faults.signing import is_signed, job_secret, signature

_NAME_PATIENCE = 10.0  # seconds for a name service that does not answer at once
_BACKLOG = 2048  # processes that may connect at the same moment
_ARRIVED = "arrived"
_PURPOSE = "membership"


def connect(backend: str, rank: int, size: int, device: torch.device, timeout: timedelta) -> None:
    """Make the default process group of all processes, each of which has shown that it knows the job's secret.

    Raises:
        UserError: there is no secret, or a process does not know it.
        NotConnected: a process could not be reached within ``timeout``.
    """
    if size == 1:
        # A world of one needs no port, and must not fail because another run on this machine took it.
        _stay_on_loopback()
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    secret = job_secret()
    if _is_loopback(os.environ["MASTER_ADDR"]):
        _stay_on_loopback()
    store = _host_store(size, timeout) if rank == 0 else _reach_store(rank, timeout.total_seconds())
    # As DeepSpeed would: NCCL connects now, not in the first step.
    binding = {"device_id": device} if device.type == "cuda" else {}
    try:
        store.set(f"{_ARRIVED}/{rank}", "")
        meeting = dist.PrefixStore("default_pg", store)  # as PyTorch would name it
        dist.init_process_group(backend, store=meeting, rank=rank, world_size=size, timeout=timeout, **binding)
        prove_membership(secret, rank, size, device)
    except RuntimeError as error:  # all that PyTorch raises; UserError is none
        raise NotConnected(_why(error, store, rank, size)) from None


def store_client(timeout: float) -> dist.TCPStore:
    """One more connection to the job's store.

    Args:
        timeout: seconds that a request may take.
    """
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
    )


def prove_membership(secret: bytes, rank: int, size: int, device: torch.device) -> None:
    """Each process shows that it knows the secret, without showing it: it signs numbers that the others drew just now.

    Raises:
        UserError: one does not.
    """
    drawn = gather_json(secrets.token_hex(16), size, device)
    shown = gather_json(signature(secret, _PURPOSE, str(rank), str(drawn)), size, device)
    for other, proof in enumerate(shown):
        if not is_signed(proof, secret, _PURPOSE, str(other), str(drawn)):
            raise UserError(
                f"the process that came as rank {other} does not know the secret of this job, which all of its processes need: start them with "
                f"one launcher, and if you did, see the repository's docs/security.md, a stranger can reach this port."
            )


def _is_loopback(address: str) -> bool:
    """Of the address as it is written: a node's own name may resolve to loopback on that node alone."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return address == "localhost"


def _stay_on_loopback() -> None:
    """Make gloo and NCCL listen where no other machine reaches them, unless the user has chosen an interface."""
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")


def _meeting_point() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def _host_store(size: int, timeout: timedelta) -> dist.TCPStore:
    address, port = _meeting_point()
    try:
        listener = _listen(address, port)
    except OSError as error:
        raise NotConnected(
            f"rank 0 cannot listen at MASTER_ADDR:MASTER_PORT {address}:{port} ({os.strerror(error.errno)}): start again, or set MASTER_PORT to a free port."
        ) from None
    return dist.TCPStore(
        address, port, size, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


def _listen(address: str, port: int) -> socket.socket:
    """On the loopback address, or on all: by which of its addresses other nodes know this one is not known here."""
    family, _, _, _, place = _resolve(address, port)
    if _is_loopback(address):
        return socket.create_server(place[:2], family=family, backlog=_BACKLOG)
    try:
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise
        return socket.create_server(("", port), backlog=_BACKLOG)  # a machine without IPv6


def _reach_store(rank: int, patience: float) -> dist.TCPStore:
    """Connect to rank 0, which may still be starting."""
    address, port = _meeting_point()
    deadline = time.monotonic() + patience
    while True:
        family, kind, protocol, _, place = _resolve(address, port)
        try:
            with socket.socket(family, kind, protocol) as probe:  # the store's own attempts write C++ tracebacks
                probe.settimeout(10)
                probe.connect(place)
            return store_client(patience)
        except (OSError, dist.DistNetworkError) as error:
            if time.monotonic() > deadline:
                reason = (error.strerror or "no answer") if isinstance(error, OSError) else "no answer"
                raise NotConnected(
                    f"rank {rank} found nobody at MASTER_ADDR:MASTER_PORT {address}:{port} for {patience:.0f} s ({reason}), rank 0 needed there: "
                    f"see whether it has started (its log) and whether a firewall stands between the nodes."
                ) from None
            time.sleep(0.2)


def _resolve(address: str, port: int) -> tuple:
    deadline = time.monotonic() + _NAME_PATIENCE
    while True:
        try:
            found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
            return min(found, key=lambda each: each[0] != socket.AF_INET)  # as the store does, which listens on both
        except (OSError, UnicodeError) as error:
            if getattr(error, "errno", None) != socket.EAI_AGAIN or time.monotonic() > deadline:
                reason = getattr(error, "strerror", None) or error
                raise NotConnected(
                    f"MASTER_ADDR is {address!r}, which cannot be found ({reason}), a host name or address of rank 0's node needed: "
                    f"start with the repository's launch/local.sh or sbatch, or correct it."
                ) from None
            time.sleep(1)


def _why(error: RuntimeError, store: dist.TCPStore, rank: int, size: int) -> str:
    """In a sentence: who has not come, if that can still be asked."""
    missing = []
    with contextlib.suppress(RuntimeError):  # the store may be what was lost
        missing = [str(other) for other in range(size) if not store.check([f"{_ARRIVED}/{other}"])]
    if missing:
        return (
            f"rank {rank} has waited in vain for {'ranks' if len(missing) > 1 else 'rank'} {', '.join(missing[:8])}"
            f"{f' and {len(missing) - 8} more' if len(missing) > 8 else ''}, all {size} processes needed: see in their logs why they did not start."
        )
    reason = str(error).partition("\n")[0]
    return (
        f"rank {rank} cannot connect to the others ({reason}): see whether one has ended (its log), or set GLOO_SOCKET_IFNAME and "
        f"NCCL_SOCKET_IFNAME to the network interface between the nodes, such as eth0 (ip addr lists them)."
    )
