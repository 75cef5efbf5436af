"""Run DALI between reader and loader, and recover from images that it cannot decode."""

from __future__ import annotations

from collections import deque

import torch
from nvidia.dali import Pipeline
from nvidia.dali.backend import ReleaseUnusedMemory, TensorListCPU, TensorListGPU  # type: ignore[attr-defined]  # not in its stub
from nvidia.dali.plugin.pytorch.torch_utils import feed_ndarray
from torch import Tensor

from pipeline.loader import dali_graph
from pipeline.loader.device_stream import DeviceStream
from pipeline.loader.reader import Encoded, Reader, undecodable


class Decoder:
    """Decodes the reader's batches in order, with one of the two graphs of :mod:`pipeline.loader.dali_graph`.

    ``whole`` runs the whole transform, on the stream's device; otherwise windows are decoded, on the CPU. ``prefetch`` is the depth of
    DALI's queue, in batches.
    """

    def __init__(self, reader: Reader, whole: bool, stream: DeviceStream, threads: int, prefetch: int) -> None:
        self._reader, self._whole, self._stream, self._threads, self._prefetch = reader, whole, stream, threads, prefetch
        self._reader_error: BaseException | None = None
        self._in_dali: deque[Encoded] = deque()  # fed but not returned; DALI preserves their order
        self._repeat: deque[Encoded] = deque()  # to be fed to the next pipeline after a failure
        self._pipeline: Pipeline = self._build()

    def windows(self) -> tuple[Encoded, list[Tensor]]:
        """The next batch as B decoded windows, (h, w, 3) uint8 each on the CPU. Raises as :meth:`pixels`."""
        encoded, output = self._next()
        return encoded, [torch.from_dlpack(window) for window in output]  # type: ignore[union-attr]  # not in DALI's stub

    def pixels(self) -> tuple[Encoded, Tensor]:
        """The next batch as (B, 3, S, S) uint8, channels_last, on the device, in the order of the current stream.

        Raises:
            UserError: too many bad samples.
            RuntimeError: DALI failed for another reason.
        """
        encoded, output = self._next()
        # Not from_dlpack, which shares the memory: DALI gives a batch's memory out again in the order of its own stream as soon
        # as the last reference is dropped, and knows nothing of the work on PyTorch's streams that still reads it. Here run()
        # makes our stream wait for DALI's, the copy is queued on ours, and the output is released in the order of ours, or of
        # DALI's after that has waited for the copy, whichever holds the last reference (DALI's Buffer::free_storage).
        dense = output.as_tensor()
        images = torch.empty(dense.shape(), dtype=torch.uint8, device=self._stream.device)  # (B, S, S, 3)
        return encoded, feed_ndarray(dense, images, cuda_stream=self._stream.cuda).permute(0, 3, 1, 2)

    def close(self) -> None:
        """Free the pipeline's memory, on the GPU too. No batch may be asked for afterwards."""
        vars(self).pop("_pipeline", None)  # gone already where a batch with bad samples could not be read again
        if self._whole:
            ReleaseUnusedMemory()

    def _next(self) -> tuple[Encoded, TensorListCPU | TensorListGPU]:
        """The next batch. If DALI fails to decode it, it is decoded again with the bad samples replaced."""
        while True:
            try:
                (output,) = self._pipeline.run(self._stream.cuda if self._whole else None)
                return self._in_dali.popleft(), output
            except RuntimeError as error:
                if self._reader_error:
                    raise self._reader_error from None
                damages = undecodable(self._reader.batches.shards, self._in_dali[0], str(error)) if self._in_dali else []
                if not damages:
                    raise
                for damage in damages:
                    self._reader.bad.add(damage)
                self._start_anew()

    def _start_anew(self) -> None:
        """Build a new pipeline and feed it the batches of the failed one, which DALI cannot reuse."""
        del self._pipeline  # freed first: two sets of decoder buffers may not fit into GPU memory
        again = [self._reader.read(encoded.number) for encoded in self._in_dali]
        self._repeat = deque([*again, *self._repeat])
        self._in_dali.clear()
        self._pipeline = self._build()

    def _build(self) -> Pipeline:
        batches = self._reader.batches
        if not self._whole:
            return dali_graph.decoding_graph(self._feed, batches.batch_size, self._threads, self._prefetch)
        return dali_graph.full_graph(self._feed, batches, self._stream.device.index, self._threads, self._prefetch)

    def _feed(self) -> tuple:
        """DALI's external-source callback: the inputs of the next batch."""
        try:
            encoded = self._repeat.popleft() if self._repeat else self._reader.next()
        except BaseException as error:  # DALI rewraps it; kept to tell it from DALI's own errors
            self._reader_error = error
            raise
        self._in_dali.append(encoded)
        inputs = dali_graph.full_inputs if self._whole else dali_graph.window_inputs
        return inputs(encoded.images, encoded.request)
