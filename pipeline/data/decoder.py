"""Runs DALI between reader and loader, and recovers from images that it cannot decode."""

from __future__ import annotations

from collections import deque

import torch
from nvidia.dali import Pipeline
from nvidia.dali.backend import TensorListCPU, TensorListGPU

from pipeline.config import DataConfig
from pipeline.data import dali_graph
from pipeline.data.bad_samples import undecodable
from pipeline.data.reader import Encoded, Reader


class Decoder:
    """Decodes the reader's batches in order, with the graph for the device.

    Args:
        reader: source of encoded batches; its ``bad`` records samples that DALI cannot decode.
        config: normalization and prefetch depth.
        device: device of the decoded batches.
        threads: CPU threads.
    """

    def __init__(self, reader: Reader, config: DataConfig, device: torch.device, threads: int) -> None:
        self._reader, self._plan, self._config, self._threads = reader, reader.plan, config, threads
        self._device_id = None
        if device.type == "cuda":
            self._device_id = torch.cuda.current_device() if device.index is None else device.index
        self._reader_error: BaseException | None = None
        self._in_dali: deque[Encoded] = (
            deque()
        )  # fed but not returned: DALI preserves their order, and on a CPU reads their arrays
        self._repeat: deque[Encoded] = deque()  # to be fed to the next pipeline after a failure
        self._pipeline: Pipeline = self._build()

    def next(self) -> tuple[Encoded, TensorListCPU | TensorListGPU]:
        """The next batch. If DALI fails to decode it, it is decoded again with the bad samples replaced.

        Raises:
            UserError: too many bad samples.
            RuntimeError: DALI failed for another reason.
        """
        while True:
            try:
                (output,) = self._pipeline.run()
                return self._in_dali.popleft(), output
            except RuntimeError as error:
                if self._reader_error:
                    raise self._reader_error from None
                damages = self._damages(str(error))
                if not damages:
                    raise
                for damage in damages:
                    self._reader.bad.add(damage)
                self._start_anew()

    def _damages(self, report: str) -> list:
        if not self._in_dali:
            return []
        failed = self._in_dali[0]
        return undecodable(self._plan.shards, failed.request.index, failed.images, report)

    def _start_anew(self) -> None:
        """Build a new pipeline and feed it the batches of the failed one, which DALI cannot reuse."""
        del self._pipeline  # freed first: two sets of decoder buffers may not fit into GPU memory
        again = [self._reader.read(encoded.number) for encoded in self._in_dali]
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
        """DALI's external-source callback: the inputs of the next batch."""
        try:
            encoded = self._repeat.popleft() if self._repeat else self._reader.next()
        except BaseException as error:  # DALI rewraps it; kept to tell it from DALI's own errors
            self._reader_error = error
            raise
        self._in_dali.append(encoded)
        if self._device_id is None:
            return dali_graph.window_inputs(encoded.images, encoded.request)
        return dali_graph.full_inputs(encoded.images, encoded.request, self._plan.image_size)
