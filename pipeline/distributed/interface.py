"""The network interface for gloo where a host's own name resolves to loopback, as Debian's installer sets it up (127.0.1.1).

gloo listens at the address that the name resolves to, so that ranks on other nodes cannot reach it. NCCL looks for an interface
by itself and leaves loopback out.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket

import psutil
import torch.distributed as dist

_VARIABLE = "GLOO_SOCKET_IFNAME"
_KEY = "address"
_ANY_PORT = 9  # no packet is sent


def choose_gloo_interface(store: dist.Store, rank: int, size: int) -> None:
    """Set GLOO_SOCKET_IFNAME to the interface towards the other ranks, unless it is set or the host's name resolves as it should.

    Every rank tells its own address in the store. Ranks on rank 0's node, for which MASTER_ADDR may be loopback too, take the
    interface towards the last rank.

    Args:
        store: of the rendezvous, which all ranks reach.
        rank, size: of this process, and the world size.

    Raises:
        RuntimeError: the last rank does not come.
    """
    own = own_address(os.environ["MASTER_ADDR"])
    store.set(f"{_KEY}/{rank}", own)
    if os.environ.get(_VARIABLE) or not name_is_loopback():
        return
    if _is_loopback(own):
        own = own_address(store.get(f"{_KEY}/{size - 1}").decode(errors="replace"))
    interface = None if _is_loopback(own) else interface_of(own)  # loopback still: all ranks are on this machine
    if interface:
        os.environ[_VARIABLE] = interface


def name_is_loopback() -> bool:
    """Whether this host's own name resolves to loopback, or not at all, when gloo takes loopback as well."""
    try:
        first = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0]
    except OSError:
        return True
    return _is_loopback(first[4][0])


def own_address(peer: str) -> str:
    """This host's address on the way to another one; empty if there is no way."""
    with contextlib.suppress(OSError, UnicodeError):
        family, kind, protocol, _, place = socket.getaddrinfo(peer, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)
            return probe.getsockname()[0]
    return ""


def interface_of(address: str) -> str | None:
    """Name of the interface that has an address."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    return None


def _is_loopback(address: object) -> bool:
    try:
        return ipaddress.ip_address(str(address).partition("%")[0]).is_loopback
    except ValueError:  # empty: not known, so no interface follows from it
        return True
