"""Bounds on what a training step asks of the GPU, counted on a pretended one."""

from __future__ import annotations

import json

import pytest

from pretended_gpu import missing, variables
from support.launching import run_module

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

# PerViT-T's step, (ranks, ZeRO stage, train.compile): at most so many launches, copies and synchronisations. The figures of a commit,
# and 3 % for other versions of PyTorch. Whoever makes a step cheaper lowers them. The goal at 8 ranks is 350, 0.
BOUNDS = {
    (1, 0, "off"): (882, 15, 0),
    (8, 0, "off"): (884, 15, 0),
    (8, 1, "off"): (1308, 401, 0),
    (8, 3, "off"): (2536, 610, 4),
    (1, 0, "blocks"): (787, 8, 0),
    (1, 0, "model"): (801, 8, 0),
    (1, 0, "graphs"): (10, 10, 0),
    (8, 0, "graphs"): (10, 10, 0),
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple, dict]:
    """The cases of :data:`BOUNDS`; what is compiled for one serves the next."""
    found, cache = {}, tmp_path_factory.mktemp("cache")
    environment = {**variables(), "TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
    for ranks, zero, kinds in ((1, "0", "off,blocks,model,graphs"), (8, "0,1,3", "off"), (8, "0", "graphs")):
        options = ("--ranks", ranks, "--zero", zero, "--compile", kinds)
        for line in run_module("pretended_gpu.steps", *options, **environment).stdout.splitlines():
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
    """Guards against counts that miss what a graph launches, or count it twice: the kernels are those of the model compiled as a
    whole, and the copies and sums of a step."""
    model, *graphs = (measured[case] for case in ((1, 0, "model"), (1, 0, "graphs"), (8, 0, "graphs")))
    assert model["in graphs"] == 0
    expected = model["launches"] + model["copies"] + model["collectives"]
    for case in graphs:
        assert case["collectives"] == 0  # they are in the graph
        assert case["launches"] + case["copies"] + case["in graphs"] == pytest.approx(expected, rel=0.05)


def test_only_several_ranks_exchange_gradients(measured: dict[tuple, dict]) -> None:
    """Guards against NCCL calls that are not counted: ZeRO 1 also gathers weights."""
    alone, together, sharded = (measured[case]["collectives"] for case in ((1, 0, "off"), (8, 0, "off"), (8, 1, "off")))
    assert alone < together < sharded
