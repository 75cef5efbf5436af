"""A program that saves one checkpoint after the other: ``--config FILE [key=value ...]``, until it is killed.

It begins like the training, from the newest intact checkpoint. Before each save every number of the weights and of their average
becomes the number of the step, so that a checkpoint that mixes two saves, or holds half of one, shows.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from pipeline.checkpoint.parts import EMA, WEIGHT
from pipeline.checkpoint.rank_slices import rank_slices
from pipeline.cluster.environment import StopSignal
from pipeline.cluster.heartbeat import Heartbeat
from pipeline.cluster.rendezvous import init_world
from pipeline.config import load_config
from pipeline.training.start import Start


@torch.no_grad()
def main() -> None:
    config, world = load_config(Path(sys.argv[2]), sys.argv[3:]), init_world()
    run = Start(config, world).open_run(StopSignal(), Heartbeat(world, config.distributed))
    wrong = 0
    for stretch in _weights(run):
        wrong += int((stretch.values != run.step).sum()) if run.step else 0
    dist.barrier()
    print(f"loaded {run.step} wrong {wrong}", flush=True)
    while True:
        run.step += 1
        for stretch in _weights(run):
            stretch.values.fill_(run.step)
        run.saver.save(run.train_state.engine, run.train_state.ema, run.state())
        run.saver.finish()


def _weights(run):
    return (held for held in rank_slices(run.train_state.engine, run.train_state.ema) if held.quantity in (WEIGHT, EMA))
