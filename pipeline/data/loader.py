"""The data loader: reads, decodes and augments the batches of a plan and yields PyTorch tensors.

::

    plan.request(i)  ->  Reader, ahead in threads  ->  Decoder (DALI)  ->  (CPU: cpu_transform)  ->  erasing, mixing  ->  Batch
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from pipeline.config import DataConfig
from pipeline.data.augment.erasing import erase_
from pipeline.data.augment.mixing import mix_, mixed_labels
from pipeline.data.bad_samples import BadSamples
from pipeline.data.cpu_transform import Finisher
from pipeline.data.decoder import Decoder
from pipeline.data.plan import BatchRequest, Plan
from pipeline.data.reader import Ahead, Reader

AnyPlan = TypeVar("AnyPlan", bound=Plan)


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank. Image i has the target ``labels[i]`` by ``weight[i]``, ``other_labels[i]`` by the rest."""

    images: Tensor  # (B, 3, image_size, image_size) float32, normalized, on the device
    labels: Tensor  # (B,) int64, on the device
    other_labels: Tensor  # (B,) int64, on the device
    weight: Tensor  # (B,) float32 in [0, 1], on the device; 1 without Mixup and CutMix
    valid: Tensor  # (B,) bool, on the device; False marks padding
    request: BatchRequest  # sample numbers and augmentation: NumPy arrays on the CPU
    replaced: int  # substitutes for bad samples


class Loader(Generic[AnyPlan]):
    """An infinite iterator over batches ``start``, ``start + 1``, ... of a plan.

    Its only state is the number of the next batch: a loader started at batch i yields exactly what another one yields after i
    batches. The caller may keep a batch; its memory is reused once no tensor refers to it.

    Args:
        plan: determines the batches.
        config: normalization, threads, prefetch depths, number of bad samples to tolerate.
        device: device of the batches; a GPU also decodes.
        cpu_threads: default for ``config.num_threads``: this rank's share of the node's cores.
        start: number of the first batch.

    Attributes:
        bad: the samples found bad so far.
    """

    def __init__(self, plan: AnyPlan, config: DataConfig, device: torch.device, cpu_threads: int = 1, start: int = 0) -> None:
        self.plan = plan
        self.device = device
        self.bad = BadSamples(plan.shards, config.max_bad_samples, left_out=not plan.substitutes_count)
        threads = config.num_threads or cpu_threads
        self._reader = Reader(plan, self.bad, start, config.read_ahead)
        self._decoder = Decoder(self._reader, config, device, threads)
        self._finisher: Finisher | None = None
        self._finished: Ahead[Batch] | None = None
        if device.type == "cpu":
            self._finisher = Finisher(plan.batch_size, plan.image_size, config.mean, config.std, threads)
            self._finished = Ahead(lambda _: self._make(), start, config.prefetch, 1, "finish")
        self._error: BaseException | None = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next batch.

        Raises:
            UserError: more than ``data.max_bad_samples`` samples cannot be read or decoded. Every further call raises it again,
                because a batch is missing.
        """
        if self._error:
            raise self._error
        try:
            return self._finished.next() if self._finished else self._make()
        except BaseException as error:
            self._error = error
            raise

    def close(self) -> None:
        """Stop the threads."""
        for part in (self._finished, self._reader, self._finisher):
            if part:
                part.close()

    def _make(self) -> Batch:
        encoded, output = self._decoder.next()
        request = encoded.request
        if self._finisher:
            decoded = [torch.from_dlpack(image) for image in output]  # type: ignore[union-attr]  # not in DALI's stub
            images = self._finisher.finish(decoded, request)
        else:
            images = torch.from_dlpack(output.as_tensor())
        if request.erasing is not None:
            erase_(images, request.erasing)
        labels = other_labels = request.label
        weight = np.ones(len(labels), dtype=np.float32)
        if request.mixing is not None:
            mix_(images, request.mixing)
            other_labels, weight = mixed_labels(labels, request.mixing)
        arrays = (labels, other_labels, weight, request.valid)
        own, other, share, valid = (to_device(values, self.device) for values in arrays)
        return Batch(images, own, other, share, valid, request, encoded.replaced)


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Copy a small array to the device asynchronously, through pinned memory: a copy from pageable memory would synchronize."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
