"""Estimate the collectives of a step: gradients and weights over the links of a node and the network between nodes, by ZeRO stage."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.optim.engine import REDUCE_BUCKET

_NUMBER = 4  # bytes: gradients and weights travel in float32 (pipeline.optim.engine)
_BUCKET = _NUMBER * REDUCE_BUCKET
CPU_LINK = 1e9  # gloo between processes of one machine, which copies through sockets; an assumption
_SHARE = 0.8  # of a link's bandwidth that NCCL's rings reach with messages of megabytes; an assumption
_ROUND = 20e-6  # seconds to begin a collective


@dataclass(frozen=True)
class Links:
    """What connects the processes.

    Attributes:
        nodes, per_node: processes.
        link: bytes per second of a GPU to the others of its node, in one direction.
        network: of a node to the others, all of its ports together.
    """

    nodes: int
    per_node: int
    link: float
    network: float

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
        return sent / (slowest * _SHARE) + messages * _ROUND


@dataclass(frozen=True)
class Traffic:
    """The collectives of an optimizer step, in seconds.

    Attributes:
        exposed: what does not hide behind the backward pass.
        bytes: that each process sends.
    """

    total: float
    exposed: float
    bytes: float


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
