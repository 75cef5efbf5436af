"""A program for ``test_engine.py``: each rank builds engines and takes steps with them; rank 0 writes down what it saw as JSON.

``engine_program FILE STAGE...``: an engine for each stage as ``train.zero_stage``, and on several processes one with DeepSpeed's own
timer left on. On GPUs where there are some.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from pipeline.cluster.rendezvous import disconnect, init_world
from pipeline.cluster.world import World
from pipeline.config import config_from_dict
from pipeline.optim import engine as under_test
from pipeline.optim.engine import build_engine, deepspeed_config, micro_batches, optimizer_step, set_learning_rate

TIMEOUT = 77  # progress_timeout; no library's default
STEPS, ACCUMULATION = 5, 2  # DeepSpeed's timer begins with the third step


class Small(nn.Module):
    """Two layers, and a parameter that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
        self.unused = nn.Parameter(torch.ones(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def no_weight_decay(self) -> set[str]:
        return set()


@contextmanager
def counting_waits() -> Iterator[list[str]]:
    """Every wait for a whole device in the block, PyTorch's own and through DeepSpeed."""
    from deepspeed.accelerator import get_accelerator

    waits, accelerator, plain = [], type(get_accelerator()), torch.cuda.synchronize

    def wait(accelerator: object, device: int | None = None) -> None:
        waits.append("deepspeed")
        through_deepspeed(accelerator, device)

    def wait_for_torch(device: int | None = None) -> None:
        waits.append("torch")
        plain(device)

    through_deepspeed, accelerator.synchronize, torch.cuda.synchronize = accelerator.synchronize, wait, wait_for_torch
    try:
        yield waits
    finally:
        accelerator.synchronize, torch.cuda.synchronize = through_deepspeed, plain


def steps(world: World, stage: int) -> dict:
    """Take some steps; what they made of the model, and what was waited for."""
    config = config_from_dict(
        {
            "train": {
                "global_batch_size": 4 * ACCUMULATION,
                "micro_batch_size": 4 // world.size,
                "precision": "fp32",
                "zero_stage": stage,
            },
            "optim": {"clip_grad_norm": 0.1, "weight_decay": 0.1},
            "augment": {"mixup": 0, "cutmix": 0},
            "distributed": {"progress_timeout": TIMEOUT},
        },
        source="the test",
    )
    before = set(dist.distributed_c10d._world.pg_map)
    engine = build_engine(Small(), config, world)
    norms = []
    generator = torch.Generator().manual_seed(1)
    with counting_waits() as waits:
        for _ in range(STEPS):
            set_learning_rate(engine, 0.01)
            for _ in micro_batches(engine):
                images = torch.randn(4, 8, generator=generator)[world.rank :: world.size].to(world.device)
                engine.backward(engine(images).square().mean())
                norm = optimizer_step(engine)
            norms.append(float(norm))
    limit = timedelta(seconds=config.distributed.collective_timeout)
    of_deepspeed = {engine.data_parallel_group} if engine.zero_optimization_stage() else set()
    groups = {*of_deepspeed, *dist.distributed_c10d._world.pg_map} - before
    return {
        "stage": int(engine.zero_optimization_stage()),
        "waits": waits,
        "norms": norms,
        "weights": {
            name: (parameter.data if stage < 3 or world.size == 1 else torch.zeros(0)).flatten().tolist()
            for name, parameter in engine.module.named_parameters()
        },
        "own groups": len(groups),
        "groups with our timeout": sum(
            group._get_backend(torch.device(world.device.type)).options._timeout == limit for group in groups | of_deepspeed
        ),
        "all groups": len(groups | of_deepspeed),
    }


def with_the_timer(make: Callable[..., dict]) -> Callable[..., dict]:
    """DeepSpeed's config as it would be without our key."""
    return lambda *arguments: {key: value for key, value in make(*arguments).items() if key != "timers"}


def main() -> int:
    world = init_world(timeout=50)
    results = {stage: steps(world, int(stage)) for stage in sys.argv[2:]}
    if world.size > 1:
        under_test.deepspeed_config = with_the_timer(deepspeed_config)
        results["with the timer"] = steps(world, 1)
    if world.is_main:
        Path(sys.argv[1]).write_text(json.dumps(results))
    disconnect()
    return 0


if __name__ == "__main__":
    sys.exit(main())
