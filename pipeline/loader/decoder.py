"""Run DALI between reader and loader, and recover from images that it cannot decode."""

import logging
from collections import deque

import torch
from nvidia.dali import Pipeline
from nvidia.dali.backend import ReleaseUnusedMemory, TensorListCPU, TensorListGPU  # type: ignore[attr-defined]  # not in its stub
from nvidia.dali.plugin.pytorch.torch_utils import feed_ndarray
from torch import Tensor

from pipeline.loader import dali_graph
from pipeline.loader.device_stream import DeviceStream
from pipeline.loader.reader import Encoded, Reader, cause, is_of_decoder, undecodable

CPU = "cpu"  # the form of decoding that is no full graph: windows, on the CPU
_REFUSALS = 8  # batches that a GPU may refuse; each costs seconds, in which the graph is built anew
_log = logging.getLogger(__name__)


class Decoder:
    """Decodes the reader's batches in order, with one of the graphs of :mod:`pipeline.loader.dali_graph`.

    ``form`` is REGIONS or WHOLE for that of the whole transform, on the stream's device, or CPU for windows alone. ``prefetch`` is the
    depth of DALI's queue, in batches. What a GPU refuses to decode, the CPU decodes: it has the last word on what is a bad sample.
    """

    def __init__(self, reader: Reader, form: str, stream: DeviceStream, threads: int, prefetch: int) -> None:
        self._reader, self._form, self._stream, self._threads, self._prefetch = reader, form, stream, threads, prefetch
        self._gpu = None if form == CPU else stream.device.index
        self._refused = 0  # batches
        self._reader_error: BaseException | None = None
        self._in_dali: deque[Encoded] = deque()  # fed but not returned; DALI preserves their order
        self._repeat: deque[Encoded] = deque()  # to be fed to the next pipeline after a failure
        self._pipeline: Pipeline = self._build()

    def windows(self) -> tuple[Encoded, list[Tensor]]:
        """The next batch as B decoded windows, (h, w, 3) uint8 each on the CPU. Raises as :meth:`pixels`."""
        encoded, output = self._next()
        return encoded, [torch.from_dlpack(window) for window in output]  # type: ignore[union-attr]  # not in DALI's stub

    def pixels(self) -> tuple[Encoded, Tensor]:
        """The next batch as (B, 3, S, S) uint8, channels_last, on the device, in the order of the current stream. Raises
        UserError: too many bad samples; RuntimeError: DALI failed for another reason."""
        encoded, output = self._next()
        if isinstance(output, TensorListCPU):
            output = _tensor(output)
        if isinstance(output, Tensor):
            return encoded, output.to(self._stream.device).permute(0, 3, 1, 2)
        # Not from_dlpack, which shares the memory: DALI gives a batch's memory out again in the order of its own stream as soon
        # as the last reference is dropped, and knows nothing of the work on PyTorch's streams that still reads it. Here run()
        # makes our stream wait for DALI's, the copy is queued on ours, and the output is released in the order of ours, or of
        # DALI's after that has waited for the copy, whichever holds the last reference (DALI's Buffer::free_storage).
        dense = output.as_tensor()
        images = torch.empty(dense.shape(), dtype=torch.uint8, device=self._stream.device)  # (B, S, S, 3)
        return encoded, feed_ndarray(dense, images, cuda_stream=self._stream.cuda).permute(0, 3, 1, 2)

    def close(self) -> None:
        """Free the pipeline's memory, on the GPU too. No batch may be asked for afterwards."""
        for part in ("_pipeline", "_reader"):  # the first is gone where a batch with bad samples could not be read again
            vars(self).pop(part, None)  # the second has the files open, and DALI keeps this object until a garbage collection
        if self._form != CPU:
            ReleaseUnusedMemory()

    def _next(self) -> tuple[Encoded, TensorListCPU | TensorListGPU | Tensor]:
        """The next batch. If DALI fails to decode it, it is decoded again: by the CPU, then with the bad samples replaced."""
        while True:
            try:
                (output,) = self._pipeline.run(None if self._gpu is None else self._stream.cuda)
                return self._in_dali.popleft(), output
            except RuntimeError as error:
                if self._reader_error:
                    raise self._reader_error from None
                if not self._in_dali:
                    raise
                failed, report = self._in_dali[0], str(error)
                if self._form != CPU and is_of_decoder(report):
                    try:
                        return failed, self._by_cpu(failed, cause(report))
                    except RuntimeError as on_cpu:
                        report = str(on_cpu)
                damages = undecodable(self._reader.batches.shards, failed, report)
                if not damages:
                    raise
                for damage in damages:
                    self._reader.bad.add(damage)
                self._start_anew()

    def _by_cpu(self, encoded: Encoded, reason: str) -> Tensor:
        """Decode the batch that the GPU refuses, and go on behind it: (B, S, S, 3) uint8. Raises RuntimeError: the CPU fails too."""
        graph = self._graph(lambda: dali_graph.full_inputs(encoded.images, encoded.request), None, prefetch=1)
        pixels = _tensor(graph.run()[0])  # before the graph is gone, and the memory with it
        self._refused += 1
        rest = "it"
        if self._refused > _REFUSALS:
            self._gpu, rest = None, "this and all that follow"
        refused = f"the GPU does not decode batch {encoded.number} ({reason})"
        _log.warning(f"{refused}: the CPU decodes {rest}, and no image counts as bad")
        self._in_dali.popleft()
        self._start_anew()
        return pixels

    def _start_anew(self) -> None:
        """Build a new pipeline and feed it the batches of the failed one, which DALI cannot reuse."""
        del self._pipeline  # freed first: two sets of decoder buffers may not fit into GPU memory
        again = [self._reader.read(encoded.number) for encoded in self._in_dali]
        self._repeat = deque([*again, *self._repeat])
        self._in_dali.clear()
        self._pipeline = self._build()

    def _build(self) -> Pipeline:
        if self._form != CPU:
            return self._graph(self._feed, self._gpu, self._prefetch)
        return dali_graph.decoding_graph(self._feed, self._reader.batches.batch_size, self._threads, self._prefetch)

    def _graph(self, source: dali_graph.Source, device_id: int | None, prefetch: int) -> Pipeline:
        return dali_graph.full_graph(source, self._reader.batches, device_id, self._threads, prefetch, self._form)

    def _feed(self) -> tuple:
        """DALI's external-source callback: the inputs of the next batch."""
        try:
            encoded = self._repeat.popleft() if self._repeat else self._reader.next()
        except BaseException as error:  # DALI rewraps it; kept to tell it from DALI's own errors
            self._reader_error = error
            raise
        self._in_dali.append(encoded)
        inputs = dali_graph.window_inputs if self._form == CPU else dali_graph.full_inputs
        return inputs(encoded.images, encoded.request)


def _tensor(output: TensorListCPU) -> Tensor:
    """A copy of images of one size: (B, S, S, 3) uint8 on the CPU."""
    return torch.from_dlpack(output.as_tensor()).clone()
