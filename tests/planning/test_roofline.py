"""Seconds of operators at a machine's rates."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from pipeline.errors import UserError
from pipeline.hardware import GPUS
from pipeline.planning.rates import CpuRates, GpuRates, measure_cpu
from pipeline.planning.trace import MAP, PRODUCT, Operator, fused

GPU = GPUS["a100-80g"]
MB = 10**6


def one(name: str, reads: dict[int, int], writes: dict[int, int], kind: str = MAP, flops: float = 0.0) -> Operator:
    return Operator(name, kind, flops, tuple(reads.items()), tuple(writes.items()), 1000, torch.bfloat16)


def test_the_slower_of_computing_and_moving_counts() -> None:
    """Guards against a roofline without one of its sides."""
    rates = GpuRates(GPU)
    moves = one("mm", {0: 900 * MB}, {1: 100 * MB}, PRODUCT, 1e9)
    assert rates.seconds(moves) == pytest.approx(1000 * MB / (GPU.bandwidth * rates.bandwidth_share))
    computes = replace(moves, flops=1e13)
    assert GPU.bf16_flops and rates.seconds(computes) == pytest.approx(1e13 / (GPU.bf16_flops * rates.shares[PRODUCT]))
    single = replace(computes, dtype=torch.float32)
    assert rates.seconds(single) > rates.seconds(computes)


def test_bf16_on_a_gpu_without_it_is_refused() -> None:
    """Guards against a plan at rates that do not exist."""
    with pytest.raises(
        UserError, match="train.precision=bf16 requires a GPU with bf16, got v100-32g: set train.precision=fp32"
    ):
        GpuRates(GPUS["v100-32g"]).seconds(one("mm", {}, {}, PRODUCT, 1e9))


def test_a_compiler_joins_adjacent_operators() -> None:
    """Guards against fusion that loses bytes: what comes from outside is read once, what others read is written."""
    chain = [
        one("gelu", {0: 10}, {1: 20}),
        one("mul", {1: 20, 2: 30}, {3: 40}),
        one("add", {3: 40, 0: 10}, {4: 50}),
        one("mm", {4: 50}, {5: 60}, PRODUCT, 1.0),
        replace(one("gelu_backward", {1: 20}, {6: 70}), backward=True),
    ]
    joined = fused(chain, kept={6})
    assert [o.name for o in joined] == ["gelu", "mm", "gelu_backward"]
    assert dict(joined[0].reads) == {0: 10, 2: 30}
    assert dict(joined[0].writes) == {1: 20, 4: 50}, "3 is read in the group alone, 1 by the backward pass too"
    assert dict(joined[2].writes) == {6: 70}
    assert dict(fused(chain, kept=set())[2].writes) == {}


def test_this_cpu_is_measured() -> None:
    """Guards against rates of the wrong unit: a product is predicted to within a factor of four of what it takes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several that wait for each other count as busy
    try:
        rates = measure_cpu("fp32", time.process_time)
        predicted, took = _product(rates)
    finally:
        torch.set_num_threads(threads)
    assert 1 / 4 < predicted / took < 4
    assert rates.bandwidth[0] > 0 and rates.bandwidth[-1] > 0 and rates.host > 0


def _product(rates: CpuRates) -> tuple[float, float]:
    """Seconds of a product of 512 x 512 numbers, by the rates and as measured."""
    a, b = torch.randn(2, 512, 512)
    took = []
    for _ in range(5):
        began = time.process_time()
        for _ in range(4):
            a @ b
        took.append((time.process_time() - began) / 4)
    predicted = rates.seconds(
        replace(one("mm", {0: 4 * 512**2, 1: 4 * 512**2}, {2: 4 * 512**2}, PRODUCT, 2 * 512**3), dtype=torch.float32)
    )
    return predicted, min(took)
