"""Which ranks share a machine."""

from __future__ import annotations

import os

import pytest

from pipeline.cluster.host import this_node


def test_processes_of_a_machine_know_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against ranks of one node that take it for several, and against strangers that are taken for neighbours where the kernel
    does not say."""
    assert _of_a_child() == this_node()

    def refused(path: str) -> str:
        raise PermissionError(path)

    monkeypatch.setattr(os, "readlink", refused)
    assert _of_a_child() != this_node() == this_node()


def _of_a_child() -> str:
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writing, this_node().encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        return answer.read()
