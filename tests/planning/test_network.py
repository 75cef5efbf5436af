"""Collectives of a step by ZeRO stage."""

from __future__ import annotations

import pytest

from pipeline.optim.flat import PARTS
from pipeline.planning.rates import Links, traffic

NODE = Links(nodes=1, per_node=8, link=300e9, network=25e9)
TWO = Links(nodes=2, per_node=8, link=300e9, network=25e9)
PARAMETERS = 100_000_000


def test_one_process_sends_nothing() -> None:
    """Guards against a network's time without a network."""
    alone = traffic(Links(1, 1, 1e9, 1e9), PARAMETERS, 0, 4, 1.0, 2.0)
    assert alone.total == alone.exposed == alone.bytes == 0


@pytest.mark.parametrize(
    "stage, accumulation, passes",
    [(0, 1, 2), (0, 4, 2), (1, 4, 3), (2, 1, 3), (2, 4, 9), (3, 1, 3), (3, 4, 12)],
)
def test_bytes_by_stage(stage: int, accumulation: int, passes: int) -> None:
    """Guards against stages that send what others do: an all-reduce is two passes over the weights' size, a gather is one."""
    sent = traffic(NODE, PARAMETERS, stage, accumulation, 0.0, 0.0)
    assert sent.bytes == pytest.approx(passes * 4 * PARAMETERS * 7 / 8)
    assert sent.total > sent.bytes / NODE.link


def test_a_backward_pass_hides_the_reduction_but_for_its_last_bucket() -> None:
    """Guards against all of a network's time, or nothing of it, in a step."""
    for stage, last in {0: 1 / PARTS, 1: 0.2, 2: 0.2}.items():
        hidden, shown = (traffic(TWO, PARAMETERS, stage, 1, 1.0, backward) for backward in (10.0, 0.0))
        assert shown.exposed == pytest.approx(shown.total)
        gathered = TWO.seconds(4 * PARAMETERS, 1, 20) if stage else 0.0
        assert gathered < hidden.exposed < gathered + 1.01 * last * (shown.exposed - gathered)


def test_the_slowest_link_counts() -> None:
    """Guards against nodes that are as close as the GPUs of one."""
    one, two = (traffic(links, PARAMETERS, 1, 1, 0.0, 0.0).total for links in (NODE, TWO))
    assert two == pytest.approx(one * 12, rel=0.1)  # 300 GB/s to 25
