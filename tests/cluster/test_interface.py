"""gloo's interface on hosts whose own name resolves to loopback; addresses and routes are this machine's."""

from __future__ import annotations

import socket

import psutil
import pytest
import torch.distributed as dist

from pipeline.cluster import host


def outward() -> tuple[str, str]:
    """An interface of this machine with an IPv4 address that others might reach."""
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == socket.AF_INET and not entry.address.startswith("127."):
                return name, entry.address
    pytest.skip("needs a network interface besides loopback")


@pytest.fixture
def named_loopback(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A host called ``debian``, which resolves to 127.0.1.1."""
    resolve = socket.getaddrinfo
    monkeypatch.setattr("socket.gethostname", lambda: "debian")
    monkeypatch.setattr(
        "socket.getaddrinfo", lambda name, *rest, **more: resolve({"debian": "127.0.1.1"}.get(name, name), *rest, **more)
    )
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    return monkeypatch


def chosen(monkeypatch: pytest.MonkeyPatch, master: str, rank: int, last: str) -> str:
    monkeypatch.setenv("MASTER_ADDR", master)
    store = dist.HashStore()
    store.set("address/3", last)
    host.choose_gloo_interface(store, rank, 4)
    return host.os.environ["GLOO_SOCKET_IFNAME"]


def test_other_nodes_can_reach_gloo(named_loopback: pytest.MonkeyPatch) -> None:
    """Guards against "Connection refused" between nodes whose installer wrote their own names into /etc/hosts."""
    name, address = outward()
    assert chosen(named_loopback, address, 1, last="") == name, "towards rank 0"
    named_loopback.setenv("GLOO_SOCKET_IFNAME", "")
    assert chosen(named_loopback, "debian", 0, last=address) == name, "on rank 0's node, towards the last rank"


def test_what_is_right_stays(named_loopback: pytest.MonkeyPatch) -> None:
    """Guards against a choice in the user's place, and against nodes on one machine that no longer find each other."""
    name, address = outward()
    assert chosen(named_loopback, "debian", 0, last="127.0.1.2") == "", "all are on this machine"
    assert chosen(named_loopback, "no-such-host.invalid", 1, last="") == "", "the rendezvous says what is wrong"
    named_loopback.setattr("socket.gethostname", lambda: address)
    assert chosen(named_loopback, address, 1, last="") == "", "the host's name is its address"
    named_loopback.setattr("socket.gethostname", lambda: "debian")
    named_loopback.setenv("GLOO_SOCKET_IFNAME", "mine")
    assert chosen(named_loopback, address, 1, last="") == "mine"
