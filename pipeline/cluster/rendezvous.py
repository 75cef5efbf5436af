"""Connect the ranks: they meet at a key-value store that rank 0 hosts, and prove to each other that they are of one job.

On one machine (MASTER_ADDR is a loopback address) nothing listens on the network. On several nodes the store and the
connections of gloo and NCCL are reachable from the network between them: ``docs/security.md``.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import ipaddress
import os
import resource
import secrets
import socket
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from pipeline.cluster.environment import job_secret
from pipeline.cluster.exchange import gather_json
from pipeline.cluster.host import choose_gloo_interface
from pipeline.errors import NotConnected, UserError, first_line

_RESOLVE_TIMEOUT = 10.0  # seconds of retries while the name service answers "try again", as it does when a job has just started
_PROBE_TIMEOUT = 10.0  # seconds for one TCP connection to rank 0's node; a firewall that drops packets answers nothing at all
_BACKLOG = 2048  # pending connections: all ranks of a large job connect at the same moment
_FILES_PER_RANK = 2  # connections of each rank to the store: the rendezvous' and the heartbeat's
_OTHER_FILES = 256  # that a process has open besides: libraries, shards, GPUs
_NAMED = 8  # missing ranks that a message names
_ARRIVED = "arrived"  # key of the store to which each rank appends its number


def connect(backend: str, rank: int, size: int, device: torch.device, timeout: timedelta) -> None:
    """Create the default process group; every rank proves that it knows the job's secret. Collective.

    Args:
        backend: "nccl" or "gloo".
        timeout: of the rendezvous, and of every later collective.

    Raises:
        UserError: there is no secret, or a rank does not know it.
        NotConnected: a rank could not be reached within ``timeout``.
    """
    if size == 1:
        # A single process needs no port, and must not fail because another run on this machine took it.
        _stay_on_loopback()
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    secret = job_secret()
    _allow_open_files(rank, size)
    on_one_machine = _written_as_loopback(os.environ["MASTER_ADDR"])
    if on_one_machine:
        _stay_on_loopback()
    store = _host_store(size, timeout) if rank == 0 else _reach_store(rank, timeout.total_seconds())
    # Eager initialization, as DeepSpeed does: NCCL connects now, not in the first step.
    binding = device if device.type == "cuda" else None
    try:
        store.append(_ARRIVED, f"{rank} ")  # type: ignore[attr-defined]  # missing in PyTorch's stubs
        if not on_one_machine:
            choose_gloo_interface(store, rank, size)
        prefixed = dist.PrefixStore("default_pg", store)  # as PyTorch would name it
        dist.init_process_group(backend, store=prefixed, rank=rank, world_size=size, timeout=timeout, device_id=binding)
        prove_membership(secret, rank, size, device)
    except RuntimeError as error:  # all that PyTorch raises; UserError is none
        raise NotConnected(_why(error, store, rank, size)) from None


def store_client(timeout: float) -> dist.TCPStore:
    """Open another connection to the job's store.

    Args:
        timeout: seconds per request.
    """
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
    )


def prove_membership(secret: bytes, rank: int, size: int, device: torch.device) -> None:
    """Challenge and response: each rank signs fresh random numbers of all ranks, which does not reveal the secret. Collective.

    Raises:
        UserError: a rank does not know the secret.
    """
    numbers = gather_json(secrets.token_hex(16), size, device)
    challenge = hashlib.sha256(str(numbers).encode()).hexdigest()  # the numbers themselves would be signed N times by N ranks
    proofs = gather_json(_proof(secret, rank, challenge), size, device)
    for other, proof in enumerate(proofs):
        if not (isinstance(proof, str) and proof.isascii() and hmac.compare_digest(proof, _proof(secret, other, challenge))):
            raise UserError(
                f"the process that came as rank {other} must know the secret of this job and does not",
                "start all processes with one launcher, and if you did, see the repository's docs/security.md, "
                "a stranger can reach this port",
            )


def _proof(secret: bytes, rank: int, challenge: str) -> str:
    """HMAC-SHA256 as 64 hexadecimal digits; no rank can repeat another one's."""
    return hmac.digest(secret, f"membership {rank} {challenge}".encode(), "sha256").hex()


def _allow_open_files(rank: int, size: int) -> None:
    """Raise the soft limit of open files, 1,024 on most systems, as far as a job of this size may need.

    Raises:
        UserError: rank 0, which hosts the store, may not have that many.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = hard == resource.RLIM_INFINITY
    needed = _FILES_PER_RANK * size + _OTHER_FILES
    if rank == 0 and not unlimited and hard < needed:
        raise UserError(
            f"the limit of open files (ulimit -Hn) of rank 0 must be at least {needed} for the connections of {size} processes, got {hard}",
            "raise the limit on its node (LimitNOFILE of slurmd, /etc/security/limits.conf)",
        )
    # Twice: gloo connects each process with each, and NCCL opens sockets too.
    wanted = 2 * needed if unlimited else min(hard, 2 * needed)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _written_as_loopback(address: str) -> bool:
    """Whether the address as written is loopback: a node's own name may resolve to loopback on that node alone."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return address == "localhost"


def _stay_on_loopback() -> None:
    """Bind gloo and NCCL to the loopback interface, unless the user has chosen another."""
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
            f"rank 0 cannot listen at MASTER_ADDR:MASTER_PORT {address}:{port} ({os.strerror(error.errno or 0)})",
            "start again, or set MASTER_PORT to a free port",
        ) from None
    return dist.TCPStore(
        address, port, size, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


def _listen(address: str, port: int) -> socket.socket:
    """Listen on loopback, or on all interfaces: which of its addresses other nodes use is unknown here."""
    family, _, _, _, place = _resolve(address, port)
    if _written_as_loopback(address):
        return socket.create_server(place[:2], family=family, backlog=_BACKLOG)
    try:
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise
        return socket.create_server(("", port), backlog=_BACKLOG)  # a machine without IPv6


def _reach_store(rank: int, timeout: float) -> dist.TCPStore:
    """Connect to rank 0, which may still be starting."""
    address, port = _meeting_point()
    deadline = time.monotonic() + timeout
    while True:
        family, kind, protocol, _, place = _resolve(address, port)
        try:
            with socket.socket(family, kind, protocol) as probe:  # the store's own attempts would print C++ tracebacks
                probe.settimeout(_PROBE_TIMEOUT)
                probe.connect(place)
            return store_client(timeout)
        except (OSError, dist.DistNetworkError) as error:
            if time.monotonic() > deadline:
                reason = (error.strerror or "no answer") if isinstance(error, OSError) else "no answer"
                raise NotConnected(
                    f"rank {rank} found nobody at MASTER_ADDR:MASTER_PORT {address}:{port} for {timeout:.0f} s ({reason}), where rank 0 must listen",
                    "check whether it has started (its log) and whether a firewall stands between the nodes",
                ) from None
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
                raise NotConnected(
                    f"MASTER_ADDR must be a host name or address of rank 0's node, got {address!r}, which cannot be found ({reason})",
                    "start with the repository's launch/local.sh or sbatch, or correct it",
                ) from None
            time.sleep(1)  # EAI_AGAIN: the name service asks for a retry


def _why(error: RuntimeError, store: dist.TCPStore, rank: int, size: int) -> str:
    """The message of a failed rendezvous; names the missing ranks if the store still answers."""
    missing: list[str] = []
    with contextlib.suppress(RuntimeError):  # the store may be what was lost
        arrived = set(store.get(_ARRIVED).decode(errors="replace").split())
        missing = [str(other) for other in range(size) if str(other) not in arrived]
    if missing:
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        return (
            f"rank {rank} timed out waiting for {'ranks' if len(missing) > 1 else 'rank'} {', '.join(missing[:_NAMED])}{more} "
            f"of {size} ranks: see in their logs why they did not start."
        )
    return (
        f"rank {rank} cannot connect to the others ({first_line(error)}): see whether one has ended (its log), or set GLOO_SOCKET_IFNAME and "
        f"NCCL_SOCKET_IFNAME to the network interface between the nodes, such as eth0 (ip addr lists them)."
    )
