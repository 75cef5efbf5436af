"""Bounds on what a training step asks of the GPU, counted on a pretended one."""

from __future__ import annotations

import json

import pytest

from pretended_gpu import missing, variables
from support.launching import run_module

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

# PerViT-T's step, (ranks, ZeRO stage, train.compile): at most so many launches, copies and synchronisations. The figures of a commit,
# and 3 % for other versions of PyTorch. Whoever makes a step cheaper lowers them.
BOUNDS = {
    (1, 0, "off"): (881, 15, 0),
    (8, 0, "off"): (883, 15, 0),
    (8, 1, "off"): (1307, 400, 0),
    (8, 2, "off"): (1307, 400, 0),
    (8, 3, "off"): (2536, 610, 4),
    (1, 0, "blocks"): (786, 6, 0),
    (1, 0, "graphs"): (265, 29, 6),  # not yet at home with the engine's bf16 copies
}


@pytest.fixture(scope="module")
def measured() -> dict[tuple, dict]:
    """The cases of :data:`BOUNDS`; one process for all of one number of ranks."""
    found = {}
    for ranks, zero, kinds in ((1, "0", "off,blocks,graphs"), (8, "0,1,2,3", "off")):
        options = ("--ranks", ranks, "--zero", zero, "--compile", kinds)
        for line in run_module("pretended_gpu.steps", *options, **variables()).stdout.splitlines():
            if line.startswith("{"):
                case = json.loads(line)
                found[case["ranks"], case["zero"], case["compile"]] = case
    return found


@pytest.mark.parametrize("case", BOUNDS, ids=lambda case: "{} ranks, ZeRO {}, {}".format(*case))
def test_a_step_stays_within_its_bounds(case: tuple, measured: dict[tuple, dict]) -> None:
    """Guards against a change that starts more kernels, copies more, or waits for the GPU where it did not, and against compiling
    that fails: such a case is missing."""
    step, (launches, copies, synchronisations) = measured[case], BOUNDS[case]
    assert 0 < step["launches"] <= launches
    assert step["copies"] <= copies
    assert step["synchronisations"] <= synchronisations


def test_graphs_hold_what_they_replace(measured: dict[tuple, dict]) -> None:
    """Guards against counts that miss what a graph launches, or count it twice: the kernels are about those of compiled blocks."""
    blocks, graphs = measured[1, 0, "blocks"], measured[1, 0, "graphs"]
    assert blocks["in graphs"] == 0 < graphs["in graphs"]
    assert graphs["launches"] + graphs["in graphs"] == pytest.approx(blocks["launches"], rel=0.1)


def test_only_several_ranks_exchange_gradients(measured: dict[tuple, dict]) -> None:
    """Guards against NCCL calls that are not counted: ZeRO 1 also gathers weights."""
    alone, together, sharded = (measured[case]["collectives"] for case in ((1, 0, "off"), (8, 0, "off"), (8, 1, "off")))
    assert alone < together < sharded
