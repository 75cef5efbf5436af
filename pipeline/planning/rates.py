"""Estimate seconds at the rates of a machine: of operators, and of a step's collectives by ZeRO stage.

An operator takes the slower of computing and moving bytes (Williams et al., "Roofline", 2009). Gradients and weights travel over the
links of a node and the network between nodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from pipeline.errors import UserError
from pipeline.hardware import Gpu
from pipeline.optim.engine import REDUCE_BUCKET
from pipeline.planning.machine import CpuRates
from pipeline.planning.trace import ATTENTION, CONVOLUTION, MAP, NARROW, PRODUCT, TRANSCENDENTAL, Operator

# Shares of a data sheet's figures that kernels reach. Of products and bandwidth they fit the step times that timm publishes for an
# RTX 3090 and an RTX 4090 (benchmarks/plan_time.py compares them); the others are assumptions, as no GPU has run this project yet.
GPU_SHARES = {PRODUCT: 0.80, ATTENTION: 0.25, CONVOLUTION: 0.40, NARROW: 0.05}
GPU_BANDWIDTH_SHARE = 0.90
_HOPPER_PRODUCTS = 0.65  # their clock falls under load, as vendors' and users' figures of large products show; an assumption
GPU_HOST = 8e-6  # seconds of the CPU to start an operator, by PyTorch without CUDA graphs; an assumption
_SHORTEST_KERNEL = 2e-6  # seconds
_NUMBER = 4  # bytes: gradients and weights travel in float32 (pipeline.optim.engine)
_BUCKET = _NUMBER * REDUCE_BUCKET
CPU_LINK = 1e9  # gloo between processes of one machine, which copies through sockets; an assumption
_LINK_SHARE = 0.8  # of a link's bandwidth that NCCL's rings reach with messages of megabytes; an assumption
_ROUND = 20e-6  # seconds to begin a collective


@dataclass(frozen=True)
class GpuRates:
    """A GPU by its data sheet and the shares of it that kernels reach."""

    gpu: Gpu
    host: float = GPU_HOST
    bandwidth_share: float = GPU_BANDWIDTH_SHARE

    @property
    def shares(self) -> dict[str, float]:
        """Of the data sheet's operations per second, by kind of operator."""
        return {**GPU_SHARES, PRODUCT: _HOPPER_PRODUCTS} if self.gpu.name.startswith(("h100", "h200")) else GPU_SHARES

    @property
    def source(self) -> str:
        shares = ", ".join(f"{100 * share:.0f} % in {kind}" for kind, share in self.shares.items())
        return f"{self.gpu.source}; kernels reach {shares}, {100 * self.bandwidth_share:.0f} % of the memory's bandwidth"

    @property
    def copies(self) -> float:
        """Bytes per second of plain copies."""
        return self.gpu.bandwidth * self.bandwidth_share

    def seconds(self, operator: Operator) -> float:
        moving = operator.bytes / self.copies
        if not operator.flops:
            return max(moving, operator.kernels * _SHORTEST_KERNEL)
        half = operator.dtype in (torch.bfloat16, torch.float16)
        peak = self.gpu.bf16_flops if half else self.gpu.fp32_flops
        if peak is None:
            raise UserError(
                f"train.precision=bf16 requires a GPU with bf16, got {self.gpu.name}",
                "set train.precision=fp32, or choose another GPU",
            )
        return max(operator.flops / (peak * self.shares[operator.kind]), moving, operator.kernels * _SHORTEST_KERNEL)


# How fast a device computes: ``seconds`` of an operator, ``host`` seconds of the CPU to start one, during which a GPU may be busy with
# others, ``copies`` in bytes per second, and the ``source`` of it all.
Rates = GpuRates | CpuRates


def seconds_by_kind(operators: Iterable[Operator], rates: Rates) -> dict[str, float]:
    """Sums by kind, in order of first appearance."""
    sums: dict[str, float] = defaultdict(float)
    for operator in operators:
        sums[operator.kind] += rates.seconds(operator)
    return dict(sums)


def fused(operators: Sequence[Operator], kept: set[int]) -> list[Operator]:
    """What a compiler makes of them: adjacent bandwidth-bound operators become one, which reads what others have written and writes what
    others read.

    Args:
        operators: in order.
        kept: numbers of the memory that is read after the last of them.
    """
    last_read: dict[int, int] = {}
    for place, operator in enumerate(operators):
        for number, _ in operator.reads:
            last_read[number] = place
    joined: list[Operator] = []
    end = 0
    for (fuses, *_), alike in groupby(
        operators, lambda operator: (operator.kind == MAP, operator.backward, operator.recomputed)
    ):
        group = list(alike)
        end += len(group)
        joined += [_joined(group, end, last_read, kept)] if fuses else group
    return joined


def _joined(group: list[Operator], end: int, last_read: dict[int, int], kept: set[int]) -> Operator:
    """The operators of a group, which ends before place ``end``, as one."""
    written: dict[int, int] = {}
    read: dict[int, int] = {}
    for operator in group:
        for number, size in operator.reads:
            if number not in written:
                read[number] = max(size, read.get(number, 0))
        for number, size in operator.writes:
            written[number] = max(size, written.get(number, 0))
    needed = {n: size for n, size in written.items() if last_read.get(n, -1) >= end or n in kept}
    slow = next((o.name for o in group if o.name in TRANSCENDENTAL), group[0].name)
    return replace(
        group[0],
        name=slow,
        reads=tuple(read.items()),
        writes=tuple(needed.items()),
        elements=max(operator.elements for operator in group),
        kernels=1 + sum(operator.name.endswith("_backward") and "norm" in operator.name for operator in group),
    )


def product_seconds(flops: float, precision: str, rates: Rates) -> float:
    """Seconds of matrix products with so many floating-point operations."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    return rates.seconds(Operator("mm", PRODUCT, flops, (), (), 0, dtype))


@dataclass(frozen=True)
class Links:
    """What connects the processes."""

    nodes: int
    per_node: int  # processes
    link: float  # bytes per second of a GPU to the others of its node, in one direction
    network: float  # of a node to the others, all of its ports together

    def seconds(self, size: float, passes: int, messages: int = 1) -> float:
        """Of a collective by rings.

        Args:
            size: bytes of the whole tensor.
            passes: 1 for an all-gather or a reduce-scatter, 2 for an all-reduce: how often each byte passes a link.
            messages: into which it is divided.
        """
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
    """The collectives of a step under a ZeRO stage, as DeepSpeed makes them with this project's settings.

    ===== ======================================================================================================
    0     one all-reduce of the gradients, after the last backward pass
    1     an all-reduce by buckets during the last backward pass, an all-gather of the updated weights
    2     the all-reduce in every micro-batch, as gradients are not kept
    3     an all-gather of the weights in every forward and backward pass, a reduce-scatter in every backward pass
    ===== ======================================================================================================

    Args:
        stage: that the engine takes, 0 on one process.
        accumulation: micro-batches of a step.
        forward, backward: seconds of a micro-batch, behind which the stages from 1 on hide their collectives.
    """
    size = _NUMBER * parameters
    messages = max(1, round(size / _BUCKET))
    once, reduced = links.seconds(size, 1, messages), links.seconds(size, 2, messages)
    one = size * (links.nodes * links.per_node - 1) / (links.nodes * links.per_node)
    last = links.seconds(min(size, _BUCKET), 2)  # of the last bucket, which nothing follows
    if stage == 0:
        return Traffic(reduced, reduced, 2 * one)
    if stage < 3:
        rounds = accumulation if stage == 2 else 1
        exposed = max(reduced - backward, min(last, reduced))
        return Traffic(rounds * reduced + once, rounds * exposed + once, (2 * rounds + 1) * one)
    exposed = max(once - forward, 0.0) + max(2 * once - backward, min(last, once))
    return Traffic(3 * accumulation * once, accumulation * exposed, 3 * accumulation * one)
