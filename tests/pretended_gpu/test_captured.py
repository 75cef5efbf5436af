"""A step that is captured as a CUDA graph holds all that a step launches, and one that cannot be leaves nothing behind."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pretended_gpu import Counts, missing, variables
from support.launching import run_module

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")
_WORK = ("kernel ", "triton ", "product ", "convolution", "memset", "nccl ")
_AROUND = 8  # launches of a step beside its graph: the learning rate of each group, what is recorded


def work(counts: Counts, prefix: str = "") -> Counts:
    """Kernels and collectives by name."""
    beginnings = tuple(prefix + each for each in _WORK)
    return Counts({name.removeprefix(prefix): count for name, count in counts.items() if name.startswith(beginnings)})


@pytest.fixture(scope="module")
def ran() -> tuple[dict[str, Any], str]:
    """What the program has found, with counts, and its errors."""
    done = run_module("pretended_gpu.captured", **variables())
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return {name: Counts(value) if isinstance(value, dict) else value for name, value in found.items()}, done.stderr


def test_a_graph_holds_the_whole_step(ran: tuple[dict[str, Any], str]) -> None:
    """Guards against a kernel, an all-reduce or an average that a graph leaves out, or that runs while it is captured, and against a step
    that waits for the GPU or copies more than its batch."""
    found, _ = ran
    assert found["hinders"] is None and found["captured"] == "graphs"
    capture, replay = found["capture"], found["replay"]
    assert not capture.named("product ", "nccl all-reduce") and capture.named("captured ") == replay.in_graphs > 0
    assert replay["graph launch"] == 1 and replay.synchronisations == replay.collectives == 0
    assert replay.launches <= _AROUND and replay.copies <= 10
    held = work(replay, "in a graph ")
    left_out = work(found["plain"]) - held - work(replay)
    assert held["nccl all-reduce"] >= 3
    assert sum(left_out.values()) <= 1, left_out  # the norm is compared by another kernel: it lies beside the loss


def test_a_failure_leaves_a_step_as_it_was(ran: tuple[dict[str, Any], str]) -> None:
    """Guards against gradients, a stream or memory of a broken capture in later steps, a run that ends, and a reason that only says that a
    capture has failed."""
    found, errors = ran
    assert found["failed"] == "model" and found["on the default stream"]
    assert work(found["after a failure"]) == work(found["plain"]) and not found["after a failure"].in_graphs
    (warning,) = [line for line in errors.splitlines() if "train.compile=graphs failed" in line]
    assert "on rank 0 (" in warning and "the run continues as with train.compile=model" in warning
    assert "AccumulateGrad" not in errors
