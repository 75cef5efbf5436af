"""The loader: runs a plan through the DALI graph and hands out PyTorch tensors."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipeline.config import DataConfig
from pipeline.data.graph import build_pipeline
from pipeline.data.plan import BatchRequest, EvalPlan, TrainPlan
from pipeline.errors import UserError


@dataclass(frozen=True)
class Batch:
    """One batch of one process."""

    images: Tensor  # (B, 3, image_size, image_size) float32, normalized, on the device
    labels: Tensor  # (B,) int64, on the device
    valid: Tensor  # (B,) bool, on the device; False marks padding
    request: BatchRequest  # which samples they are: NumPy arrays on the CPU


class Loader:
    """Batches ``start``, ``start + 1``, ... of a plan, endlessly.

    All state is the number of the next batch. A loader that starts at batch i yields exactly what another one yields
    after i batches.

    Args:
        plan: what to read.
        config: normalization, threads, prefetch.
        device: where the batches end up; decoding runs there too.
        cpu_threads: this process's share of the node's cores; used where the config does not say.
        start: number of the first batch.
    """

    def __init__(
        self, plan: TrainPlan | EvalPlan, config: DataConfig, device: torch.device, cpu_threads: int = 1, start: int = 0
    ) -> None:
        self.plan = plan
        self.device = device
        self._next = start
        self._requested: deque[BatchRequest] = deque()  # DALI asks ahead; its results come back in the same order
        self._pipeline = build_pipeline(
            source=self._supply,
            batch_size=plan.batch_size,
            image_size=plan.image_size,
            mean=config.mean,
            std=config.std,
            device_id=device.index if device.type == "cuda" else None,
            num_threads=config.num_threads or cpu_threads,
            prefetch=config.prefetch,
        )

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next batch.

        Raises:
            UserError: a sample could not be read or decoded.
        """
        try:
            (output,) = self._pipeline.run()
        except RuntimeError as error:
            self._raise_if_undecodable(error)
            raise
        request = self._requested.popleft()
        images = torch.from_dlpack(output.as_tensor())
        return Batch(images, self._to_device(request.label), self._to_device(request.valid), request)

    def _to_device(self, values: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(values)
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)  # from pageable memory it would wait for the GPU

    def _supply(self) -> tuple:
        """DALI's callback: the inputs of the next batch."""
        request = self.plan.request(self._next)
        self._next += 1
        jpegs = self.plan.shards.read_jpegs(request.index)
        self._requested.append(request)
        geometry = request.geometry
        return jpegs, geometry.start, geometry.shape, geometry.resize, *geometry.crop.T.copy(), geometry.flip

    def _raise_if_undecodable(self, error: RuntimeError) -> None:
        """Turn DALI's report of a decoding failure, which counts samples within a batch, into one that names the sample."""
        failed = re.search(r"decode sample #(\d+)", str(error))
        if failed:
            shards, index = self.plan.shards, self._requested[0].index[int(failed[1])]
            file = shards.info.shards[shards.samples["shard"][index]].file
            raise UserError(
                f"{shards.folder / file}: sample {shards.key(index)} cannot be decoded, a sound JPEG needed: copy the file again, or "
                f"mend the image in the source and shard again."
            ) from None
