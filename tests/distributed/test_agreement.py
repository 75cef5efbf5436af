"""Status of all ranks together: as one group, and as a grid of rows and columns."""

from __future__ import annotations

import json
import math

import pytest

from pipeline.distributed.agreement import FLAT, grid
from support.ranks import run_forked


@pytest.mark.parametrize("size", [2, 31, 33, 48, 64, 97, 360, 1024])
def test_a_status_reaches_all_through_a_row_and_a_column(size: int) -> None:
    """Guards against a rank that nobody hears, and against ranks that do not agree on who is in a group."""
    groups = [grid(rank, size, FLAT) for rank in range(size)]
    for stage in range(len(groups[0])):
        assert all(groups[member][stage] == groups[rank][stage] for rank in range(size) for member in groups[rank][stage])
    heard = [{rank} for rank in range(size)]
    for stage in range(len(groups[0])):
        together = {groups[rank][stage][0]: set().union(*(heard[m] for m in groups[rank][stage])) for rank in range(size)}
        heard = [together[groups[rank][stage][0]] for rank in range(size)]
    assert all(each == set(range(size)) for each in heard)
    if size <= FLAT or size == 97:  # a prime number
        assert groups[size - 1] == [list(range(size))]
    else:
        assert sum(map(len, groups[0])) <= 4 * math.isqrt(size)


@pytest.mark.multiprocess
def test_all_hear_the_same_at_the_same_call() -> None:
    """Guards against ranks that stop, or publish a checkpoint, at different steps: six processes as one group and as 2 x 3."""
    ran = run_forked("distributed.agreement_program", 32, 2, processes=6)
    nothing, said = [0, False, 0], [[0, False, call] for call in range(7)]
    said[2][0], said[3][1] = 15, True
    for late, found in enumerate(json.loads(ran.stdout.splitlines()[-1]), 1):
        assert found == {"heard": ([nothing] * late + said)[:7], "asked": [True, True, False]}
