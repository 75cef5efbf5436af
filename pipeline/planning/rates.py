"""Estimate seconds at the rates of a machine: of operators, on a GPU or on this CPU, and of a step's collectives by ZeRO stage.

An operator takes the slower of computing and moving bytes (Williams et al., "Roofline", 2009). Gradients and weights travel over the
links of a node and the network between nodes.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.benchmark import Timer

from pipeline.errors import UserError, counted
from pipeline.hardware import Gpu
from pipeline.optim.engine import REDUCE_BUCKET
from pipeline.optim.flat import PARTS
from pipeline.planning.trace import ATTENTION, CONVOLUTION, MAP, NARROW, PERIPHERAL, PHI_MAPS, PRODUCT, TRANSCENDENTAL, Operator

# Shares of a data sheet's figures that kernels reach. They fit the steps that others have published for five GPUs
# (benchmarks/results/plan_time_published.csv); the share of depthwise convolutions is an assumption.
_SHARES = {PRODUCT: 0.55, ATTENTION: 0.25, CONVOLUTION: 0.60, NARROW: 0.05}
# Of our kernels (docs/results/gpu_step.md): of attention 43 to 56 TFLOP/s on an H200, Φp in three TF32 products for one of float32.
_OURS = {PERIPHERAL: 0.055, PHI_MAPS: 0.10}
# Cards for games clock higher than their data sheets say; Hopper and Blackwell lower under load, and their matrix units are too
# fast for products of a vision model's widths. The first letters of their names:
_PRODUCTS = {"rtx": 1.0, "h": 0.45, "b": 0.45}
_SINGLE = 0.80  # of products outside of the matrix units, in float32; an assumption
_SHORTEST_KERNEL = 2e-6  # seconds
_NUMBER = 4  # bytes: gradients and weights travel in float32 (pipeline.optim.engine)
_BUCKET = _NUMBER * REDUCE_BUCKET
CPU_LINK = 1e9  # gloo between processes of one machine, which copies through sockets; an assumption
_LINK_SHARE = 0.8  # of a link's bandwidth that NCCL's rings reach with messages of megabytes; an assumption
_ROUND = 20e-6  # seconds to begin a collective

_SIZES = (2**20, 2**23, 2**26)  # bytes that a copy moves: within a core's cache, within the last cache, beyond
_LINEAR_SHARE = 0.9  # of the large product's speed in linear layers (docs/results/step.md)
_BATCHED_SHARE = 0.65  # likewise in attention's products, whose matrices are small
_BUSY = 1.5  # times the cores, from which on others slow a measurement down
_FRESH = 0.12  # seconds for each measurement


@dataclass(frozen=True)
class GpuRates:
    """A GPU by its data sheet and the shares of it that kernels reach."""

    gpu: Gpu
    # Seconds of the CPU to start an operator without CUDA graphs, on an EPYC; 60e-6 on the virtual CPUs beside an H200.
    host = 25e-6
    bandwidth_share = 0.75

    @property
    def shares(self) -> dict[str, float]:
        """Of the data sheet's operations per second, by kind of operator."""
        product = next((share for letters, share in _PRODUCTS.items() if self.gpu.name.startswith(letters)), _SHARES[PRODUCT])
        return {**_SHARES, PRODUCT: product}

    @property
    def source(self) -> str:
        shares = ", ".join(f"{100 * share:.0f} % in {kind}" for kind, share in self.shares.items())
        return f"{self.gpu.source}; kernels reach {shares}, {100 * self.bandwidth_share:.0f} % of the memory's bandwidth"

    @property
    def copies(self) -> float:
        """Bytes per second of plain copies."""
        return self.gpu.bandwidth * self.bandwidth_share

    def seconds(self, operator: Operator) -> float:
        least = max(operator.bytes / self.copies, operator.kernels * _SHORTEST_KERNEL)
        if not operator.flops:
            return least
        half = operator.dtype in (torch.bfloat16, torch.float16)
        peak = self.gpu.bf16_flops if half else self.gpu.fp32_flops
        if peak is None:
            problem = f"train.precision=bf16 requires a GPU with bf16, got {self.gpu.name}"
            raise UserError(problem, "set train.precision=fp32, or choose another GPU")
        share = self.shares[operator.kind] if half or operator.kind != PRODUCT else _SINGLE
        return max(operator.flops / (peak * _OURS.get(operator.name, share)), least)


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
        speed = f"{self.product / 1e9:.0f} GFLOP/s in products, {self.bandwidth[-1] / 1e9:.1f} GB/s of memory{busy}"
        return f"measured on this machine, {counted(self.threads, 'thread')}: {speed}"

    @property
    def copies(self) -> float:
        return self.bandwidth[-1]

    def seconds(self, operator: Operator) -> float:
        # Between the measured sizes.
        logarithm = np.interp(np.log(max(operator.bytes, 1)), np.log(_SIZES), np.log(self.bandwidth))
        moving = operator.bytes / float(np.exp(logarithm))
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


# How fast a device computes: ``seconds`` of an operator, ``host`` seconds of the CPU to start one, during which a GPU may be busy with
# others, ``copies`` in bytes per second, and the ``source`` of it all.
Rates = GpuRates | CpuRates


def measure_cpu(precision: str, clock: Callable[[], float] = time.perf_counter) -> CpuRates:
    """Measure this process's share of the machine by a small operator of each kind, at PyTorch's number of threads.
    ``precision``: of products, "bf16" or "fp32". ``clock``: seconds; ``time.process_time`` where others compute."""
    least, dtype = partial(_least, clock), torch.bfloat16 if precision == "bf16" else torch.float32
    matrices = torch.randn(2, 1024, 1024)
    a, b = matrices.to(dtype)
    images = torch.randn(8, 64, 56, 56).contiguous(memory_format=torch.channels_last).to(dtype)
    tokens = torch.randn(16, 192, 14, 14).to(dtype)
    values, scores = torch.randn(2**18), torch.randn(256, 1024)
    weights = scores.softmax(-1)
    bandwidth = []
    for size in _SIZES:
        x, y = torch.ones(2, size // 12)
        bandwidth.append(size / least(partial(torch.add, x, y, out=torch.empty_like(x))))
    return CpuRates(
        product=2 * 1024**3 / least(lambda: a @ b),
        single=2 * 1024**3 / least(lambda: matrices[0] @ matrices[1]),
        convolution=_convolution_rate(least, images, torch.randn(64, 64, 3, 3).to(dtype), 1),
        narrow=_convolution_rate(least, tokens, torch.randn(192, 1, 3, 3).to(dtype), 192),
        bandwidth=tuple(bandwidth),
        elementary=least(lambda: F.gelu(values)) / values.numel(),
        score=least(lambda: torch.softmax(scores + scores, -1)) / scores.numel(),
        score_backward=least(lambda: torch._softmax_backward_data(scores, weights, -1, torch.float32) + scores)
        / scores.numel(),
        host=least(partial(_many_operators, torch.randn(8, requires_grad=True))) / 200,
        threads=torch.get_num_threads(),
        load=os.getloadavg()[0],
    )


def _convolution_rate(least: Callable[[Callable[[], Any]], float], images: Tensor, weight: Tensor, groups: int) -> float:
    """Operations per second of a 3 x 3 convolution's forward and backward pass."""
    x, w = images.clone().requires_grad_(), weight.clone().requires_grad_()

    def step() -> None:
        F.conv2d(x, w, padding=1, groups=groups).backward(images)
        x.grad = w.grad = None

    return 3 * 2 * images.numel() * weight[0].numel() / least(step)


def _many_operators(x: Tensor) -> None:
    """100 forward, and as many backward."""
    y, factor = x, x.detach()
    for _ in range(100):
        y = y * factor
    y.sum().backward()
    x.grad = None


def _least(clock: Callable[[], float], call: Callable[[], Any]) -> float:
    """Seconds of a call, the least of those that ``_FRESH`` seconds have room for."""
    timer = Timer("call()", timer=clock, globals={"call": call}, num_threads=torch.get_num_threads())
    return min(timer.blocked_autorange(min_run_time=_FRESH).times)


@dataclass(frozen=True)
class Links:
    """What connects the processes."""

    nodes: int
    per_node: int  # processes
    link: float  # bytes per second of a GPU to the others of its node, in one direction
    network: float  # of a node to the others, all of its ports together

    def seconds(self, size: float, passes: int, messages: int = 1) -> float:
        """Of a collective by rings. ``size``: bytes of the whole tensor, divided into ``messages``. ``passes``: 1 for an all-gather or a
        reduce-scatter, 2 for an all-reduce: how often each byte passes a link."""
        processes = self.nodes * self.per_node
        if processes == 1:
            return 0.0
        sent = passes * size * (processes - 1) / processes
        slowest = min(self.link if self.per_node > 1 else float("inf"), self.network if self.nodes > 1 else float("inf"))
        return sent / (slowest * _LINK_SHARE) + messages * _ROUND


@dataclass(frozen=True)
class Traffic:
    """The collectives of an optimizer step, in seconds."""

    total: float
    exposed: float  # what does not hide behind the backward pass
    bytes: float  # that each process sends


def traffic(links: Links, parameters: int, stage: int, accumulation: int, forward: float, backward: float) -> Traffic:
    """The collectives of a step under a ZeRO stage, as our engine makes them without ZeRO, and DeepSpeed's from stage 1 on.

    ===== ======================================================================================================
    0     an all-reduce of the gradients by parts during the last backward pass
    1     an all-reduce by buckets during the last backward pass, an all-gather of the updated weights
    2     the all-reduce in every micro-batch, as gradients are not kept
    3     an all-gather of the weights in every forward and backward pass, a reduce-scatter in every backward pass
    ===== ======================================================================================================

    ``stage``: that the engine takes, 0 on one process. ``accumulation``: micro-batches of a step. ``forward``, ``backward``: seconds of a
    micro-batch, behind which collectives hide.
    """
    size = _NUMBER * parameters
    bucket, messages = (min(size, _BUCKET), max(1, round(size / _BUCKET))) if stage else (size / PARTS, PARTS)
    once, reduced = links.seconds(size, 1, messages), links.seconds(size, 2, messages)
    one = size * (links.nodes * links.per_node - 1) / (links.nodes * links.per_node)
    last = links.seconds(bucket, 2)  # of the last one, which nothing follows
    if stage < 3:
        rounds, gathered = accumulation if stage == 2 else 1, once if stage else 0.0
        exposed = max(reduced - backward, min(last, reduced))
        return Traffic(rounds * reduced + gathered, rounds * exposed + gathered, (2 * rounds + bool(stage)) * one)
    exposed = max(once - forward, 0.0) + max(2 * once - backward, min(last, once))
    return Traffic(3 * accumulation * once, accumulation * exposed, 3 * accumulation * one)
