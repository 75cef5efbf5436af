"""Batches that lie in memory, in the loader's place: steps without a loader, and steps where DALI is not installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock, patch

import numpy as np
import torch

from benchmarks.gpu.common import has_module

if TYPE_CHECKING:
    from pipeline.loader.loader import Batch

_DALI = "nvidia.dali"
_DRAWN = 8  # batches, which are fewer than steps before the measurement


class _Nothing(MetaPathFinder, Loader):
    """Finds DALI and every module in it, and loads modules of mocks."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        inside = name == _DALI or name.startswith(f"{_DALI}.")
        return ModuleSpec(name, self, is_package=True) if inside else None

    def create_module(self, spec: ModuleSpec) -> Any:
        return MagicMock(__path__=[])  # with a path, it may have modules of its own

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


def pretend_dali() -> None:
    """Let modules of mocks take DALI's place, so that what imports it can be imported, whatever is installed."""
    if not has_module("nvidia"):  # else the CUDA libraries of PyTorch's wheels are in it
        sys.modules["nvidia"] = MagicMock(__path__=[])
    sys.meta_path.insert(0, _Nothing())


class InMemory:
    """Stands in for ``Loader``: real requests, and so real labels, mixing weights and noise, with one batch of random pixels.

    A few of them are drawn and then repeat: a loader draws in another thread, and 5 ms of it in this one would be a part of each step.
    """

    failure = None  # nothing is read ahead
    decode = "gpu"  # where a run's checkpoint would say that images are decoded

    def __init__(self, batches: Any, device: torch.device, max_bad_samples: int, start: int = 0) -> None:
        from pipeline.loader.reader import BadSamples

        self.batches, self.device, self._next = batches, device, start
        self.bad = BadSamples(batches.shards, max_bad_samples, left_out=False)
        self.images = torch.randn(batches.batch_size, 3, batches.image_size, batches.image_size, device=device)  # (B, 3, H, W)
        self._drawn: list[Batch] = []

    def __iter__(self) -> InMemory:
        return self

    def __next__(self) -> Batch:
        if len(self._drawn) < _DRAWN:
            self._drawn.append(self._draw())
            return self._drawn[-1]
        self._next += 1
        return self._drawn[self._next % _DRAWN]

    def _draw(self) -> Batch:
        from pipeline.augment.mixing import MixupCutmix, mixed_labels
        from pipeline.loader.loader import Batch

        request = self.batches.request(self._next)
        self._next += 1
        labels = other_labels = request.label
        weight = np.ones(len(labels), dtype=np.float32)
        mixing = request.drawn(MixupCutmix)
        if mixing is not None:
            other_labels, weight = mixed_labels(labels, mixing)
        arrays = [self._put(each) for each in (labels, other_labels, weight, request.valid)]
        return Batch(self.images, *arrays, request=request, replaced=0)

    def _put(self, values: np.ndarray) -> torch.Tensor:
        """On the device without a wait, as the loader does."""
        tensor = torch.from_numpy(values)
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)

    def close(self) -> None:
        """Nothing runs."""


@contextmanager
def batches_in_memory() -> Iterator[None]:
    """Runs that start within have :class:`InMemory` for their training loader, and no evaluation."""
    from pipeline.cluster.world import World
    from pipeline.loader.batches import TrainBatches
    from pipeline.training import start

    def loader(shards: Any, settled: Any, world: World, first_step: int, model: Any) -> InMemory:
        config = settled.config
        batches = TrainBatches.of_run(shards, config, world.rank, world.size)
        in_memory = InMemory(batches, world.device, config.data.max_bad_samples, first_step * batches.batches_per_step)
        # As the run's loader gives them.
        if world.device.type == "cuda" and config.train.precision == "bf16" and model.image_format:
            in_memory.images = in_memory.images.to(torch.bfloat16, memory_format=model.image_format)
        return in_memory

    with patch.object(start, "training_loader", loader), patch.object(start, "evaluation_loader", MagicMock()):
        yield
