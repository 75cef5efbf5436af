"""What a rank saves, and its copy in host memory: the only part of a save that stalls the training."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline.checkpoint.held import held
from pipeline.checkpoint.parts import BUFFER, EMA_BUFFER, slice_key
from pipeline.distributed.world import World
from pipeline.optim.ema import WeightAverage
from pipeline.optim.engine import Engine

# Ranks that write what all ranks hold. More would not be faster, but a rank that loads needs all of it: it opens their files.
_WRITERS = 16
_ALIGNMENT = 16  # bytes per tensor start, a multiple of every element size: views need it


def saved_tensors(engine: Engine, ema: WeightAverage | None, world: World) -> dict[str, Tensor]:
    """The live tensors that this rank saves: what only it holds, and if it is a writer its share of what all hold of weights,
    moments and averages; on rank 0 also buffers and their averages. Empty for some ranks of a large world."""
    tensors = {}
    writers = min(world.size, _WRITERS)
    writer = writer_number(world.rank, world.size, writers)
    for piece in held(engine, ema):
        share = piece.share(writer, writers)
        if share:
            tensors[slice_key(share.quantity, share.name, share.start)] = share.values.detach()
    if world.is_main:
        for name, buffer in saved_buffers(engine.module).items():
            tensors[slice_key(BUFFER, name, 0)] = buffer.detach()
        for name, average in ema.buffers.items() if ema else ():
            tensors[slice_key(EMA_BUFFER, name, 0)] = average.reshape(-1)
    return tensors


def writer_number(rank: int, size: int, writers: int) -> int | None:
    """Which of ``writers`` ranks, spread evenly over all, this one is; None: none of them."""
    number = -(-rank * writers // size)
    return number if number * size // writers == rank else None


def bytes_of_all(engine: Engine, ema: WeightAverage | None, world: World) -> int:
    """Bytes that all ranks save together, about: slices that not all hold are taken to be of one size."""
    pieces = [piece for piece in held(engine, ema) if not piece.copy]
    shared = sum(piece.values.nbytes for piece in pieces if piece.replicated)
    return shared + world.size * sum(piece.values.nbytes for piece in pieces if not piece.replicated)


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The state dict without parameters: for example BatchNorm's running statistics."""
    parameters = {name for name, _ in model.named_parameters()}
    return {name: value for name, value in model.state_dict().items() if name not in parameters}


class HostCopies:
    """Host copies of tensors in one allocation that all snapshots reuse.

    So only the first snapshot pays for the allocation, and a GPU copies asynchronously into pinned memory.
    """

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}

    def take(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy the tensors; this overwrites the previous copies.

        Args:
            tensors: on the CPU or one GPU.

        Returns:
            Contiguous CPU tensors with the same names, shapes and dtypes.
        """
        if _layout(self._copies) != _layout(tensors):
            self._copies.clear()  # frees their memory before the new allocation
            self._copies.update(_allocate(tensors))
        for name, tensor in tensors.items():
            self._copies[name].copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()  # the copies' own; the device would include the loader's work ahead
        return self._copies


def _layout(tensors: dict[str, Tensor]) -> list[tuple]:
    return [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]


def _allocate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors with the same names, shapes and dtypes in one allocation; pinned if any tensor is on a GPU."""
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors.values()]
    on_gpu = any(tensor.is_cuda for tensor in tensors.values())
    places = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=on_gpu).split(sizes) if sizes else ()
    return {
        name: place[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for place, (name, tensor) in zip(places, tensors.items())
    }
