"""Which ranks share a machine, whether a node answers, and what a process of it waits for."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from pipeline.cluster.host import cause_on, hanging_read, this_node


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


def _of_a_child() -> str:
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writing, this_node().encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        return answer.read()
