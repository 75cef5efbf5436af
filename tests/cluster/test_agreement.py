"""Status of all ranks together, exchanged with every call or with every third one."""

from __future__ import annotations

import json

import pytest

from support.ranks import run_forked


@pytest.mark.multiprocess
def test_all_hear_the_same_at_the_same_call() -> None:
    """Guards against ranks that stop, or publish a checkpoint, at different steps, and against a status that is lost between exchanges."""
    ran = run_forked("cluster.agreement_program", 1, 3, processes=4)
    nothing, said = [0, False, 0], [[0, False, call] for call in range(9)]
    for call in range(2, 9):
        said[call][0] = 15
    said[3][1] = True
    every_call, every_third = json.loads(ran.stdout.splitlines()[-1])
    assert every_call == {"heard": [nothing, *said[:8]], "asked": [True, True, False]}
    assert every_third == {"heard": [nothing] * 3 + [said[0]] * 3 + [said[3]] * 3, "asked": [True, True, False]}
