"""Measure what it costs a step to know which rank the others wait for.

    python -m benchmarks.scale_stragglers [--ranks 2 8]

Real ranks over gloo exchange the metrics of ten steps, as every ``log.every_steps``, with and without finding the slowest one, in turns.
They share this machine's cores, so that more ranks than cores mostly wait for each other.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import secrets
import socket
import statistics
import time
from typing import Any

os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR")

import torch  # noqa: E402

from pipeline.cluster.environment import SECRET  # noqa: E402
from pipeline.cluster.rendezvous import disconnect, init_world  # noqa: E402
from pipeline.cluster.waits import count_waits  # noqa: E402
from pipeline.command_line import run_command  # noqa: E402
from pipeline.logs.reduction import MetricReduction  # noqa: E402
from pipeline.metrics import Metric  # noqa: E402

STEPS, TURNS = 10, 300
_METRICS = {"loss": Metric("mean", [torch.tensor(1.0)]), "lr": Metric("mean", [0.1]), "data_wait": Metric("slowest", [0.1])}


class Without(MetricReduction):
    def _slowest(self, *_: Any) -> dict[str, Any]:
        return {}


def _rank(rank: int, size: int, shared: dict[str, str], results: Any) -> None:
    places = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    os.environ.update({**shared, **{name: str(value) for name, value in places.items()}})
    world = init_world(300.0)
    count_waits()
    kinds = {"with": MetricReduction(world), "without": Without(world)}
    took: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(TURNS):
        for name, reduction in kinds.items():
            world.gather(turn)  # all begin together
            began = time.perf_counter()
            reduction.rows([_METRICS] * STEPS, 1.0, 0.3 + 0.5 * rank / size)
            took[name].append(time.perf_counter() - began)
    if world.is_main:
        results.put({name: statistics.median(times) for name, times in took.items()})
    world.gather(0)
    disconnect()


def measure(size: int) -> dict[str, float]:
    """Median seconds of an exchange of ten steps' metrics between so many ranks, with and without the slowest one."""
    context = multiprocessing.get_context("spawn")
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), SECRET: secrets.token_hex(32)}
    results = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, size, shared, results)) for rank in range(size)]
    for process in ranks:
        process.start()
    found = results.get(timeout=300)
    for process in ranks:
        process.join()
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 8])
    print("| ranks | exchange of ten steps | of which for the slowest rank, a step |\n|---|---|---|")
    for size in parser.parse_args().ranks:
        found = measure(size)
        more = (found["with"] - found["without"]) / STEPS
        print(
            f"| {size} | {1e3 * found['with']:.1f} ms, {found['with'] / found['without']:.2f} times as long | {1e3 * more:.2f} ms |"
        )


if __name__ == "__main__":
    run_command(main)
