"""Which ranks share a machine, whether a node answers, and what a process of it waits for."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from faults.nodes import Node, limited, running_nodes
from pipeline.cluster.host import cause_on, hanging_read, this_node, unanswered
from support.namespaces import enter


def test_processes_of_a_machine_know_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against ranks of one node that take it for several, and against strangers that are taken for neighbours where the kernel
    does not say."""
    assert _of_a_child() == this_node()

    def refused(path: str) -> str:
        raise PermissionError(path)

    monkeypatch.setattr(os, "readlink", refused)
    assert _of_a_child() != this_node() == this_node()


def test_a_read_that_does_not_return_is_found(tmp_path: Path) -> None:
    """Guards against a hang of which nobody learns the file, and against files that were read meanwhile."""
    os.mkfifo(tmp_path / "silent")
    other_end = os.open(tmp_path / "silent", os.O_RDWR)
    reader = threading.Thread(target=(tmp_path / "silent").read_bytes)
    reader.start()
    found, calls, deadline = "", set(), time.monotonic() + 60
    while not found and time.monotonic() < deadline:
        found, calls = hanging_read(calls)
        time.sleep(0.05)
    os.write(other_end, b"word")
    os.close(other_end)
    reader.join()
    if not calls:
        pytest.skip("this kernel does not tell the calls of threads")
    assert found == str(tmp_path / "silent")
    assert hanging_read(calls)[0] == ""


def test_a_node_that_answers_is_told_from_one_that_does_not() -> None:
    """Guards against a healthy node that is called lost, and the reverse; a node of which no address is known is neither."""
    assert cause_on("n1", "127.0.0.1").startswith("its node answers") and "dmesg on n1" in cause_on("n1", "127.0.0.1")
    assert "does not answer either, n1 is down" in cause_on("n1", "255.255.255.255")
    assert "answer" not in cause_on("n1", "")


@pytest.mark.multiprocess
def test_a_node_that_acknowledges_nothing_is_found() -> None:
    """Guards against a cut between two nodes that nobody sees, and against a process that does not read taken for one: its node lives."""
    with running_nodes(2) as nodes, ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:  # a thread on each node
        for thread, node in zip((one, other), nodes.nodes):
            thread.submit(enter, node.namespaces[:1]).result()
        address = nodes.nodes[1].address
        with other.submit(socket.create_server, (address, 0)).result() as listener:
            with (
                one.submit(socket.create_connection, listener.getsockname()).result() as first,
                one.submit(socket.create_connection, listener.getsockname()).result() as second,
            ):
                first.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    while first.send(bytes(1 << 16)):  # nobody reads
                        pass
                time.sleep(4)
                assert unanswered() == ""
                nodes.switch.set(nodes.switch.between(1), loss=1.0)
                second.send(b"word")
                deadline = time.monotonic() + 60
                while not unanswered() and time.monotonic() < deadline:
                    time.sleep(0.1)
                assert unanswered() == address


@pytest.mark.multiprocess
def test_memory_is_what_the_cgroup_may_have(tmp_path: Path) -> None:
    """Guards against plans for the memory of the machine in a job that gets a part of it, and files' pages that count as used."""
    with limited(Node(0, None), "memory", bytes_=1 << 30) as group:
        program = f"""
import torch
from pathlib import Path
from pipeline.cluster.host import memory
Path({str(group / "cgroup.procs")!r}).write_text("0")
before = memory()
Path({str(tmp_path / "file")!r}).write_bytes(bytes(200 << 20))
cached, kept = memory(), b"1" * (300 << 20)
print(*before, *cached, *memory())
"""
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    total, free, _, cached, _, after = map(int, ran.stdout.split())
    assert total == 1 << 30 and 0.8 * total < free <= total
    assert free - cached < 50 << 20 and 250 << 20 < cached - after < 400 << 20


def _of_a_child() -> str:
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writing, this_node().encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        return answer.read()
