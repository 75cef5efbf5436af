"""Measure this machine: the rates of its CPU, by a small operator of each kind, and what the loader takes on the real shards."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from pipeline.config import Config
from pipeline.loader.batches import TrainBatches
from pipeline.loader.loader import CPU, Loader
from pipeline.planning.trace import ATTENTION, CONVOLUTION, MAP, NARROW, TRANSCENDENTAL, Operator
from pipeline.shards.shard_set import ShardSet
from pipeline.stores.place import Place

Clock = Callable[[], float]
Call = Callable[[], Any]
_SIZES = (2**20, 2**23, 2**26)  # bytes that a copy moves: within a core's cache, within the last cache, beyond
_LINEAR_SHARE = 0.9  # of the large product's speed in linear layers (benchmarks/RESULTS.md, "The training step on a CPU")
_BATCHED_SHARE = 0.65  # likewise in attention's products, whose matrices are small
_BUSY = 1.5  # times the cores, from which on others slow a measurement down
_FRESH = 0.12  # seconds for each measurement
_LOADER_SECONDS = 3.0
_LARGEST_BATCH = 32  # images: small batches begin soon, and cost as much each
_WARM_UP = 2  # batches of the loader


@dataclass(frozen=True)
class CpuRates:
    """A CPU with a number of threads, as measured."""

    # Floating-point operations per second, in the run's precision where nothing else is said.
    product: float  # of two large matrices
    single: float  # the same in float32, in which attention is computed, and what autocast leaves alone
    convolution: float  # 3 x 3, of 64 channels
    narrow: float  # a depthwise one
    bandwidth: tuple[float, ...]  # bytes per second of an addition that moves ``_SIZES`` bytes
    elementary: float  # seconds for an element of GELU
    score: float  # and for one of a softmax over a map that is in a cache, forward
    score_backward: float
    host: float  # seconds to start an operator
    threads: int
    load: float = 0.0  # processes that wanted a core each, of all users

    @property
    def source(self) -> str:
        cores = len(os.sched_getaffinity(0))
        busy = f", while {self.load:.0f} processes wanted its {cores} cores" if self.load > _BUSY * cores else ""
        return (
            f"measured on this machine, {self.threads} thread{'s' * (self.threads != 1)}: {self.product / 1e9:.0f} GFLOP/s in products, "
            f"{self.bandwidth[-1] / 1e9:.1f} GB/s of memory{busy}"
        )

    @property
    def copies(self) -> float:
        return self.bandwidth[-1]

    def seconds(self, operator: Operator) -> float:
        moving = operator.bytes / self._bandwidth_at(operator.bytes)
        if operator.kind == MAP:
            computing = operator.elements * self.elementary if operator.name in TRANSCENDENTAL else 0.0
        elif operator.kind == ATTENTION:
            per_score = self.score_backward if operator.backward and not operator.recomputed else self.score
            computing = operator.flops / (self.single * _BATCHED_SHARE) + operator.elements * per_score
        elif operator.kind in (CONVOLUTION, NARROW):
            computing = operator.flops / (self.convolution if operator.kind == CONVOLUTION else self.narrow)
        else:
            rate = self.single if operator.dtype is torch.float32 else self.product
            computing = operator.flops / (rate * (_BATCHED_SHARE if "b" in operator.name else _LINEAR_SHARE))
        return max(computing, moving) + self.host

    def _bandwidth_at(self, moved: int) -> float:
        """Between the measured sizes by the logarithm."""
        return float(np.exp(np.interp(np.log(max(moved, 1)), np.log(_SIZES), np.log(self.bandwidth))))


def measure_cpu(precision: str, clock: Clock = time.perf_counter) -> CpuRates:
    """Measure this process's share of the machine, at PyTorch's number of threads.

    Args:
        precision: of products, "bf16" or "fp32".
        clock: seconds; ``time.process_time`` on a machine that others use, with one thread.
    """
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    matrices = torch.randn(2, 1024, 1024)
    a, b = matrices.to(dtype)
    images = torch.randn(8, 64, 56, 56).contiguous(memory_format=torch.channels_last).to(dtype)
    tokens = torch.randn(16, 192, 14, 14).to(dtype)
    dense, depthwise = torch.randn(64, 64, 3, 3).to(dtype), torch.randn(192, 1, 3, 3).to(dtype)
    values, scores = torch.randn(2**18), torch.randn(256, 1024)
    weights = scores.softmax(-1)
    small = torch.randn(8)
    least = _least(clock)
    bandwidth = []
    for size in _SIZES:
        x, y = torch.ones(2, size // 12)
        out = torch.empty_like(x)
        bandwidth.append(size / least(partial(torch.add, x, y, out=out)))
    forward = least(lambda: torch.softmax(scores + scores, -1)) / scores.numel()
    backward = least(lambda: torch._softmax_backward_data(scores, weights, -1, torch.float32) + scores) / scores.numel()
    return CpuRates(
        product=2 * 1024**3 / least(lambda: a @ b),
        single=2 * 1024**3 / least(lambda: matrices[0] @ matrices[1]),
        convolution=_convolution_rate(least, images, dense, 1),
        narrow=_convolution_rate(least, tokens, depthwise, 192),
        bandwidth=tuple(bandwidth),
        elementary=least(lambda: F.gelu(values)) / values.numel(),
        score=forward,
        score_backward=backward,
        host=_overhead(least, small),
        threads=torch.get_num_threads(),
        load=os.getloadavg()[0],
    )


def _convolution_rate(least: Callable[[Call], float], images: torch.Tensor, weight: torch.Tensor, groups: int) -> float:
    """Operations per second of a 3 x 3 convolution's forward and backward pass."""
    x, w = images.clone().requires_grad_(), weight.clone().requires_grad_()

    def step() -> None:
        F.conv2d(x, w, padding=1, groups=groups).backward(images)
        x.grad = w.grad = None

    return 3 * 2 * images.numel() * weight[0].numel() / least(step)


def _overhead(least: Callable[[Call], float], small: torch.Tensor) -> float:
    """Seconds to start an operator, of a forward and a backward pass through 100."""
    x = small.clone().requires_grad_()

    def step() -> None:
        y = x
        for _ in range(100):
            y = y * small
        y.sum().backward()
        x.grad = None

    return least(step) / 200


def _least(clock: Clock) -> Callable[[Call], float]:
    def least(call: Call) -> float:
        call()
        best, end = math.inf, time.perf_counter() + _FRESH
        repetitions = 1
        while True:
            began = clock()
            for _ in range(repetitions):
                call()
            took = clock() - began
            if took < 2e-3 and repetitions < 10_000:  # so short that the clock's own steps count
                repetitions *= 4
                continue
            best = min(best, took / repetitions)
            if time.perf_counter() > end:
                return best

    return least


@dataclass(frozen=True)
class LoaderNeed:
    """CPU seconds of an image, decoded and augmented on the CPU; bytes of an encoded one; images measured."""

    cpu_seconds: float
    bytes: float
    images: int

    def cores(self, images_per_second: float) -> float:
        """CPU cores, as fast as this machine's, that keep up with so many images per second."""
        return self.cpu_seconds * images_per_second


def measure_loader(config: Config, shards: Place, threads: int = 2, seconds: float = _LOADER_SECONDS) -> LoaderNeed:
    """Load training batches from a shard set as a run would on CPUs, and drop them.

    Args:
        config: data and augmentation.
        shards: a shard set with a train split, in a folder or a store.
        seconds: how long to measure; at least two batches.

    Raises:
        UserError: the shards cannot be read, or too many samples are bad.
    """
    train_set = ShardSet(shards, "train")
    unit = config.augment.unit
    batch = max(unit, min(config.train.micro_batch, _LARGEST_BATCH) // unit * unit)
    batches = TrainBatches.for_one_process(train_set, config, batch)
    loader = Loader(batches, config.data, torch.device("cpu"), threads, decode=CPU)
    try:
        for _ in range(_WARM_UP):
            next(loader)
        # Of all threads. The queues are as full at the end as at the beginning.
        began, cpu, taken = time.perf_counter(), time.process_time(), 0
        while taken < 2 or time.perf_counter() - began < seconds:
            next(loader)
            taken += 1
        spent = time.process_time() - cpu
    finally:
        loader.close()
    return LoaderNeed(spent / (taken * batch), float(train_set.samples["bytes"].mean()), taken * batch)
