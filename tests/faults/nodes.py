"""Nodes of a cluster in one machine: network namespaces with host names, addresses and links of their own.

The links are TAP devices, and a thread of the test carries the frames between them: it can delay them, thin their stream out, lose
some or all, in one direction or both, without anything of the kernel's but ``/dev/net/tun``. Needs root; the rest skips itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support.namespaces import enter
from support.ranks import Job

_TUN, _TUNSETIFF, _TAP_WITHOUT_HEADER = "/dev/net/tun", 0x400454CA, 0x1002
_MTU = 16000  # bytes; a thread of Python carries each frame
_BROADCAST = 1  # the bit of an Ethernet address for more than one receiver
_INSIDE = """
hostname {name} && ip link set lo up && echo ready && exec cat
"""


@dataclass
class Link:
    """How frames travel from one node to another."""

    delay: float = 0.0  # seconds
    bandwidth: float = float("inf")  # bytes per second
    loss: float = 0.0  # share of the frames; 1: cut
    free_at: float = 0.0  # when the last frame has been sent


@dataclass(frozen=True)
class Node:
    """A node: a process holds its namespaces until its stdin is closed."""

    number: int
    holder: subprocess.Popen
    cgroups: list[Path] = field(default_factory=list)  # that its ranks join

    @property
    def name(self) -> str:
        return f"n{self.number}"

    @property
    def address(self) -> str:
        return f"10.77.0.{self.number + 1}"

    @property
    def namespaces(self) -> list[str]:
        return [f"/proc/{self.holder.pid}/ns/{kind}" for kind in ("net", "uts", "mnt")]

    @property
    def inside(self) -> list[str]:
        """The words before a command that runs on the node."""
        return ["nsenter", *(f"--{kind}={path}" for kind, path in zip(("net", "uts", "mount"), self.namespaces))]

    def do(self, *words: object) -> None:
        """Run a command in the node's namespaces."""
        subprocess.run([*self.inside, *map(str, words)], check=True)

    def plug(self) -> int:
        """Create the node's interface; returns the descriptor of the cable's other end."""
        made: list[int | OSError] = []

        def inside() -> None:  # a thread can be in another network than its process
            try:
                enter(self.namespaces[:1])
                made.append(os.open(_TUN, os.O_RDWR | os.O_NONBLOCK))
                fcntl.ioctl(made[0], _TUNSETIFF, struct.pack("16sH22x", b"eth0", _TAP_WITHOUT_HEADER))
            except OSError as error:
                made.append(error)

        thread = threading.Thread(target=inside)
        thread.start()
        thread.join()
        if isinstance(made[-1], OSError):
            pytest.skip(f"cannot make an interface here: {made[-1]}")
        self.do("ip", "link", "set", "eth0", "address", f"02:00:00:00:00:{self.number:02x}", "mtu", _MTU, "up")
        self.do("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        return made[0]


class Switch:
    """Carries frames between the nodes in a thread, and spoils them as its links say."""

    def __init__(self, ports: list[int]) -> None:
        self._ports = ports
        numbers = range(len(ports))
        self.links = {(one, other): Link() for one in numbers for other in numbers if one != other}
        self._on_the_way: list[tuple[float, int, int, bytes]] = []  # when it arrives, number, port, frame
        self._frames, self._draw, self._ends = 0, random.Random(0), threading.Event()
        self._thread = threading.Thread(target=self._carry, name="switch", daemon=True)
        self._thread.start()

    def set(self, pairs: list[tuple[int, int]], **values: float) -> None:
        """Change links, by (sender, receiver)."""
        for pair in pairs:
            for name, value in values.items():
                setattr(self.links[pair], name, value)

    def between(self, one: int, *others: int, back: bool = True) -> list[tuple[int, int]]:
        """The links from a node to others, to all if none is named, and those ``back``."""
        others = others or tuple(number for number in range(len(self._ports)) if number != one)
        return [(one, other) for other in others] + [(other, one) for other in others if back]

    def close(self) -> None:
        self._ends.set()
        self._thread.join()
        for port in self._ports:
            os.close(port)

    def _carry(self) -> None:
        senders = {port: number for number, port in enumerate(self._ports)}
        while not self._ends.is_set():
            due = self._on_the_way[0][0] - time.monotonic() if self._on_the_way else 0.1
            for port in select.select(self._ports, [], [], min(max(due, 0), 0.1))[0]:
                with contextlib.suppress(OSError):  # nothing more to read
                    for _ in range(32):
                        self._send(senders[port], os.read(port, _MTU + 64))
            while self._on_the_way and self._on_the_way[0][0] <= time.monotonic():
                _, _, number, frame = heapq.heappop(self._on_the_way)
                with contextlib.suppress(OSError):  # the receiver's queue is full: a loss, as on any network
                    os.write(self._ports[number], frame)

    def _send(self, sender: int, frame: bytes) -> None:
        to_all, now = frame[0] & _BROADCAST, time.monotonic()
        for number in range(len(self._ports)):
            if number == sender or not (to_all or frame[5] == number):
                continue
            link = self.links[sender, number]
            if self._draw.random() >= link.loss:
                link.free_at = max(link.free_at, now) + len(frame) / link.bandwidth
                self._frames += 1
                heapq.heappush(self._on_the_way, (link.free_at + link.delay, self._frames, number, frame))


@dataclass
class Nodes:
    """Some nodes and what is between them."""

    nodes: list[Node]
    switch: Switch

    def name_all(self, hosts: Path) -> None:
        """Let the nodes find each other by their names, in a file that becomes their /etc/hosts."""
        hosts.write_text("".join(f"{node.address} {node.name}\n" for node in self.nodes) + "127.0.0.1 localhost\n")
        for node in self.nodes:
            node.do("mount", "--bind", hosts, "/etc/hosts")

    def job(self, *arguments: object, each: int = 1, **environment: str | list[str] | None) -> Job:
        """Start ``pipeline.train`` with ``each`` ranks on every node, numbered node by node."""
        places = [node for node in self.nodes for _ in range(each)]
        return Job(
            len(places),
            *arguments,
            enter=[{"namespaces": node.namespaces, "cgroups": list(map(str, node.cgroups))} for node in places],
            **{
                "MASTER_ADDR": self.nodes[0].address,
                "LOCAL_RANK": [str(rank % each) for rank in range(len(places))],
                **environment,
            },
        )


@contextmanager
def running_nodes(count: int) -> Iterator[Nodes]:
    """Nodes n0, n1, ... that reach each other at 10.77.0.1, 10.77.0.2, ..."""
    if os.geteuid() != 0 or not os.path.exists(_TUN):
        pytest.skip(f"needs root and {_TUN} for nodes with networks of their own")
    with ExitStack() as stack:
        nodes, ports = [], []
        for number in range(count):
            node = Node(number, stack.enter_context(_held(f"n{number}")))
            nodes.append(node)
            ports.append(node.plug())
        switch = Switch(ports)
        stack.callback(switch.close)
        yield Nodes(nodes, switch)


@contextmanager
def _held(name: str) -> Iterator[subprocess.Popen]:
    words = ["unshare", "--net", "--uts", "--mount", "sh", "-c", _INSIDE.format(name=name)]
    holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        if holder.stdout.readline() != "ready\n":
            pytest.skip(f"cannot make a network namespace here: {holder.communicate()[1].strip()}")
        yield holder
    finally:
        holder.communicate()


@contextmanager
def limited(node: Node, kind: str, *, bytes_: int = 0, cores: float = 0.0) -> Iterator[Path]:
    """A cgroup, of either version, in which the node's ranks have so much "memory" or "cpu"; gives its folder."""
    old, new = Path("/sys/fs/cgroup") / kind, Path("/sys/fs/cgroup")
    unified = (new / "cgroup.controllers").exists()
    try:
        group = Path(tempfile.mkdtemp(prefix="pervit-", dir=new if unified else old))
    except OSError as error:
        pytest.skip(f"cannot make a cgroup here: {error}")
    names = {
        ("memory", True): [("memory.max", bytes_)],
        ("memory", False): [("memory.limit_in_bytes", bytes_)],
        ("cpu", True): [("cpu.max", f"{int(cores * 100_000)} 100000")],
        ("cpu", False): [("cpu.cfs_quota_us", int(cores * 100_000))],
    }[kind, unified]
    try:
        for name, value in names:
            (group / name).write_text(str(value))
        node.cgroups.append(group)
        yield group
    except OSError as error:
        pytest.skip(f"cannot limit {kind} here: {error}")
    finally:
        _remove(group)


@contextmanager
def short_of_memory(group: Path) -> Iterator[None]:
    """In the block, the processes of a cgroup need more memory than it has left, and the kernel kills the largest."""
    new = (group / "memory.max").exists()
    limit = group / ("memory.max" if new else "memory.limit_in_bytes")
    used, before = int((group / ("memory.current" if new else "memory.usage_in_bytes")).read_text()), limit.read_text()
    limit.write_text(str(used + (64 << 20)))
    greedy = f"open({str(group / 'cgroup.procs')!r}, 'w').write('0'); kept = bytearray(128 << 20); input()"
    with subprocess.Popen([sys.executable, "-c", greedy], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as other:
        yield
        other.kill()
    limit.write_text(before)


def _remove(group: Path) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:  # its processes have just been killed
        with contextlib.suppress(OSError):
            return group.rmdir()
        time.sleep(0.1)
