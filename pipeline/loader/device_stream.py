"""Give the loader a CUDA stream of its own, copy arrays to the device in one piece, and hand batches to the stream that trains."""

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes: any element type may begin there, and vectorized loads too


class DeviceStream:
    """The CUDA stream on which the loader's thread prepares batches. On a CPU there is none, and each method is trivial.

    What the loader does for later batches runs beside the training on this one. Training's stream receives a batch by

    1. waiting, on the device, for an event that was recorded after the last operation on the batch, and
    2. ``record_stream``: the memory belongs to the loader's stream, in whose order PyTorch's allocator would give it out again
       as soon as the batch is garbage. So told, the allocator also waits for what training's stream was given until then.

    ``cuda`` without an index is the current GPU of the calling thread.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.cuda = device, None
        if device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
            self.cuda = torch.cuda.Stream(self.device)

    def work(self) -> AbstractContextManager:
        """A context whose operations run on this stream, and whose tensors are allocated in its order."""
        return torch.cuda.stream(self.cuda) if self.cuda else nullcontext()

    def done(self) -> torch.cuda.Event | None:
        """An event after all work so far."""
        return self.cuda.record_event() if self.cuda else None

    def receive(self, tensors: Iterable[Tensor], done: torch.cuda.Event | None) -> None:
        """Let the caller's current stream use tensors, one of each storage, that were made on this one before ``done`` was recorded."""
        if done:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(done)
            for tensor in tensors:
                tensor.record_stream(current)


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copy arrays to the device, asynchronously on the current stream, in one copy.

    Through pinned memory: a copy from pageable memory would wait for the device. PyTorch's allocator of pinned memory keeps the
    block until the copy is done. Returns the tensors, which share one storage; on a CPU they share the arrays' memory.
    """
    if device.type == "cpu":
        return [torch.from_numpy(values) for values in arrays]
    return unpack(pack(arrays, pin_memory=True).to(device, non_blocking=True), arrays)


def pack(arrays: Sequence[np.ndarray], pin_memory: bool = False) -> Tensor:
    """The arrays' bytes, one array after the other, each aligned: (bytes,) uint8 on the CPU."""
    packed = torch.empty(sum(map(_aligned_size, arrays)), dtype=torch.uint8, pin_memory=pin_memory)
    for part, values in zip(unpack(packed, arrays), arrays):
        part.numpy()[...] = values
    return packed


def unpack(packed: Tensor, arrays: Sequence[np.ndarray]) -> list[Tensor]:
    """The inverse of :func:`pack`, on any device: views of ``packed`` with the types and shapes of ``arrays``."""
    parts = zip(packed.split([_aligned_size(values) for values in arrays]), arrays)
    return [part[: each.nbytes].view(torch.from_numpy(each[:0]).dtype).view(each.shape) for part, each in parts]


def _aligned_size(values: np.ndarray) -> int:
    return math.ceil(values.nbytes / _ALIGNMENT) * _ALIGNMENT
