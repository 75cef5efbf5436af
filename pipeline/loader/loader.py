"""Read, decode and augment batches and yield PyTorch tensors (ARCHITECTURE.md: the life of a batch)."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, count, islice
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from pipeline.augment import BatchRequest
from pipeline.config import DataConfig
from pipeline.errors import UserError
from pipeline.loader.batches import Batches
from pipeline.loader.cpu_transform import Finisher, Normalization
from pipeline.loader.dali_graph import REGIONS
from pipeline.loader.decoder import CPU, Decoder
from pipeline.loader.device_stream import DeviceStream, upload
from pipeline.loader.reader import Ahead, BadSamples, Encoded, Reader
from pipeline.stores.store import StoreFails

AnyBatches = TypeVar("AnyBatches", bound=Batches)
GPU, AUTO = "gpu", "auto"  # values of data.decode, beside CPU


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank. Image i has the target ``labels[i]`` by ``weight[i]``, ``other_labels[i]`` by the rest."""

    images: Tensor  # (B, 3, image_size, image_size), normalized, on the device; float32 unless the loader was asked for another type
    labels: Tensor  # (B,) int64, on the device
    other_labels: Tensor  # (B,) int64, on the device
    weight: Tensor  # (B,) float32 in [0, 1], on the device; 1 without Mixup and CutMix
    valid: Tensor  # (B,) bool, on the device; False marks padding
    request: BatchRequest  # sample numbers and augmentation: NumPy arrays on the CPU
    replaced: int  # substitutes for bad samples


class Loader(Iterator[Batch], Generic[AnyBatches]):
    """An infinite iterator over batches ``start``, ``start + 1``, ...

    Its only state is the number of the next batch: a loader started at batch i yields exactly what another one yields after i
    batches. The caller may keep a batch; its memory is reused once no tensor refers to it. On a GPU, batches belong to the
    CUDA stream that is current where they are taken. Raises UserError: as :func:`decoding_device`.

    Args:
        config: normalization, threads, prefetch depths, number of bad samples to tolerate.
        cpu_threads: default for ``config.num_threads``: this rank's share of the node's cores.
        start: number of the first batch, which the others follow; or the endless numbers of all.
        bad: records the samples that cannot be used; default: the loader's own.
        decode: where to decode, instead of ``config.decode``.
        form: what a GPU decodes, as :mod:`pipeline.loader.probe` finds out: REGIONS, or WHOLE images.
        image_format: data type and memory format of the images; augmentations compute in float32 before.
    """

    def __init__(
        self,
        batches: AnyBatches,
        config: DataConfig,
        device: torch.device,
        cpu_threads: int = 1,
        start: int | Iterable[int] = 0,
        bad: BadSamples | None = None,
        decode: str | None = None,
        form: str = REGIONS,
        image_format: tuple[torch.dtype, torch.memory_format] = (torch.float32, torch.contiguous_format),
    ) -> None:
        self.batches, self.decode, self._image_format = batches, decode or config.decode, image_format
        form = form if decoding_device(self.decode, device) == GPU else CPU
        if bad is None:  # a record without bad samples is empty, and so false
            bad = BadSamples(batches.shards, config.max_bad_samples, left_out=not batches.substitutes_count)
        self.bad = bad
        threads = config.num_threads or cpu_threads
        self._stream = DeviceStream(device)
        self.device = self._stream.device
        self._reader = Reader(batches, self.bad, start, config.read_ahead)
        self._decoder = Decoder(self._reader, form, self._stream, threads, config.prefetch)
        self._normalization = Normalization(config.mean, config.std)
        sizes = batches.batch_size, batches.image_size
        self._finisher = Finisher(*sizes, config.mean, config.std, threads) if form == CPU else None
        self._finished = Ahead(lambda _: self._make(), count(), config.prefetch, 1, "finish")
        self._error: BaseException | None = None

    @property
    def failure(self) -> StoreFails | None:
        """What will end the loader at a later batch, where that is known: there is time to save what was trained."""
        return self._reader.failure

    def __next__(self) -> Batch:
        """The next batch. Raises UserError: more than ``data.max_bad_samples`` samples cannot be read or decoded. Every further
        call raises it again, because a batch is missing."""
        if self._error:
            raise self._error
        try:
            batch, done = self._finished.next()
        except BaseException as error:
            self._error = error
            raise
        self._stream.receive((batch.images, batch.labels), done)
        return batch

    def close(self) -> None:
        for part in (self._finished, self._reader, self._finisher, self._decoder):
            if part:
                part.close()

    def _make(self) -> tuple[Batch, torch.cuda.Event | None]:
        with self._stream.work():
            encoded, images = self._images()
            batch, (dtype, layout) = augmented(images, encoded.request, encoded.replaced), self._image_format
            # One kernel on this stream; the model's own casts would read and write the images twice on the one that trains.
            return replace(batch, images=batch.images.to(dtype, memory_format=layout)), self._stream.done()

    def _images(self) -> tuple[Encoded, Tensor]:
        """The next batch, decoded and transformed: (B, 3, S, S) float32, normalized, on the device."""
        if not self._finisher:
            encoded, pixels = self._decoder.pixels()
            return encoded, self._normalization(pixels)
        encoded, windows = self._decoder.windows()
        if self.device.type == "cpu":  # normalized image by image, by the thread that has it in its cache
            return encoded, self._finisher.finish(windows, encoded.request)
        pixels = self._finisher.finish_pixels(windows, encoded.request, pin_memory=True)
        return encoded, self._normalization(pixels.to(self.device, non_blocking=True))


def augmented(images: Tensor, request: BatchRequest, replaced: int = 0, at_once: bool | None = None) -> Batch:
    """Apply what follows normalization to images (B, 3, S, S) float32 on the device, in place, and add the labels.

    With ``at_once``, the default on a GPU, in a few operations on the whole batch and with one copy to the device; otherwise image by
    image and group by group, as suits a CPU's caches. The pixels are the same; on a GPU Mixup rounds in its own way.
    """
    at_once = images.device.type != "cpu" if at_once is None else at_once
    other_labels, weight = request.label, np.ones(len(request.label), dtype=np.float32)
    for augmentation in request.of_batches:
        other_labels, weight = augmentation.mixed_labels(request) or (other_labels, weight)
    shape = tuple(images.shape)
    needed = [augmentation.device_arrays(request, shape) if at_once else () for augmentation in request.of_batches]
    arrays = request.label, other_labels, weight, request.valid
    there = iter(upload([*arrays, *chain.from_iterable(needed)], images.device))
    own, other, share, valid = islice(there, len(arrays))
    for augmentation, uploaded in zip(request.of_batches, needed):
        if at_once:
            augmentation.apply_batch_(images, request, *islice(there, len(uploaded)))
        else:
            augmentation.apply_(images, request)
    return Batch(images, own, other, share, valid, request, replaced)


def decoding_device(decode: str, device: torch.device, name: str = "data.decode") -> str:
    """Where to decode, "gpu" or "cpu": ``auto`` is the device; :mod:`pipeline.loader.trial` measures instead. Raises UserError:
    there is no GPU to decode on; ``name`` is the setting's."""
    here = CPU if device.type == "cpu" else GPU
    if decode == GPU and here == CPU:
        raise UserError(f"{name} is gpu, but this process has no GPU", "set it to auto, or start where there is a GPU")
    return here if decode == AUTO else decode
