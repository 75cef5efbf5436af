"""DALI under the loader: encoded batches in, decoded ones out in the same order, over images that cannot be decoded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from nvidia.dali import Pipeline
from nvidia.dali.backend import TensorListCPU, TensorListGPU

from pipeline.config import DataConfig
from pipeline.data import dali_graph
from pipeline.data.bad_samples import BadSamples, undecodable
from pipeline.data.plan import BatchRequest, EvalPlan, TrainPlan


@dataclass(frozen=True)
class Encoded:
    """A batch as it comes from the disk."""

    number: int
    request: BatchRequest
    images: list[np.ndarray]  # B of (bytes,) uint8
    replaced: int  # samples of it that stand in for bad ones


class Decoder:
    """Runs the graph that fits the device.

    Args:
        plan: what is read.
        config: normalization and how much is decoded ahead.
        device: where the batches end up.
        threads: CPU threads.
        supply: the next encoded batch.
        read_again: an encoded batch by its number, with the bad samples that are known by now replaced.
        bad: where samples are noted that DALI fails on.
    """

    def __init__(
        self,
        plan: TrainPlan | EvalPlan,
        config: DataConfig,
        device: torch.device,
        threads: int,
        supply: Callable[[], Encoded],
        read_again: Callable[[int], Encoded],
        bad: BadSamples,
    ) -> None:
        self._plan, self._config, self._threads = plan, config, threads
        self._device_id = None
        if device.type == "cuda":
            self._device_id = torch.cuda.current_device() if device.index is None else device.index
        self._supply, self._read_again, self._bad = supply, read_again, bad
        self._supply_error: BaseException | None = None
        self._in_dali: deque[Encoded] = deque()  # its results come back in the order of its inputs
        self._repeat: deque[Encoded] = deque()  # to be given to DALI once more
        self._pipeline: Pipeline | None = self._build()

    def next(self) -> tuple[Encoded, TensorListCPU | TensorListGPU]:
        """The next batch; one that DALI fails on goes in again, without the samples that it failed on.

        Raises:
            UserError: there are too many bad samples.
            RuntimeError: DALI failed for another reason.
        """
        while True:
            try:
                (output,) = self._pipeline.run()
                return self._in_dali.popleft(), output
            except RuntimeError as error:
                if self._supply_error:
                    raise self._supply_error from None
                damages = self._damages(str(error))
                if not damages:
                    raise
                for damage in damages:
                    self._bad.add(damage)
                self._start_anew()

    def _damages(self, report: str) -> list:
        if not self._in_dali:
            return []
        failed = self._in_dali[0]
        return undecodable(self._plan.shards, failed.request.index, failed.images, report)

    def _start_anew(self) -> None:
        """Give what the failed pipeline held to a new one: DALI calls the old one invalid."""
        self._pipeline = None  # first, for two sets of decoder buffers may not fit on a GPU
        again = [self._read_again(encoded.number) for encoded in self._in_dali]
        self._repeat = deque([*again, *self._repeat])
        self._in_dali.clear()
        self._pipeline = self._build()

    def _build(self) -> Pipeline:
        plan, config = self._plan, self._config
        if self._device_id is None:
            return dali_graph.decoding_graph(self._feed, plan.batch_size, self._threads, config.prefetch)
        return dali_graph.full_graph(
            self._feed,
            plan.batch_size,
            plan.image_size,
            config.mean,
            config.std,
            self._device_id,
            self._threads,
            config.prefetch,
            plan.rand_augment_ops,
        )

    def _feed(self) -> tuple:
        """DALI's callback: the inputs of the next batch."""
        try:
            encoded = self._repeat.popleft() if self._repeat else self._supply()
        except BaseException as error:  # our own error must not be taken for one of DALI's
            self._supply_error = error
            raise
        self._in_dali.append(encoded)
        if self._device_id is None:
            return dali_graph.window_inputs(encoded.images, encoded.request)
        return dali_graph.full_inputs(encoded.images, encoded.request, self._plan.image_size)
