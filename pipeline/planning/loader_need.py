"""What the loader takes on the real shards: CPU time and bytes of an image, measured for a few seconds with the loader itself."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from pipeline.config import Config
from pipeline.data.batches import TrainBatches
from pipeline.data.loader import CPU, Loader
from pipeline.data.shards import ShardSet
from pipeline.stores.place import Place

_SECONDS = 3.0
_LARGEST_BATCH = 32  # images: small batches begin soon, and cost as much each
_WARM_UP = 2  # batches


@dataclass(frozen=True)
class LoaderNeed:
    """CPU seconds of an image, decoded and augmented on the CPU; bytes of an encoded one; images measured."""

    cpu_seconds: float
    bytes: float
    images: int

    def cores(self, images_per_second: float) -> float:
        """CPU cores, as fast as this machine's, that keep up with so many images per second."""
        return self.cpu_seconds * images_per_second


def measure_loader(config: Config, shards: Place, threads: int = 2, seconds: float = _SECONDS) -> LoaderNeed:
    """Load training batches from a shard set as a run would on CPUs, and drop them.

    Args:
        config: data and augmentation.
        shards: a shard set with a train split, in a folder or a store.
        threads: that decode.
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
