"""Read the counts of the pretended GPU, inside of a program that runs on it."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

_LAUNCHES = ("kernel ", "triton ", "product ", "convolution", "cuDNN ", "batch normalization", "memset", "graph launch")


class Counts(Counter[str]):
    """How often each call was made, by name.

    Names begin with what they are: "kernel" (PyTorch's own, NCCL excluded), "triton" (ours and Inductor's), "product" (cuBLAS),
    "convolution" and "batch normalization" (cuDNN; one or more kernels), "memset", "graph launch"; "copy H2D", D2H, D2D;
    "synchronisation of ..."; "nccl ..."; "event record", "wait for an event"; "allocation". What is captured into a CUDA graph has
    "captured" in front, once, and "in a graph" at each launch of the graph.
    """

    def named(self, *beginnings: str) -> int:
        """How many calls have names that begin so."""
        return sum(count for name, count in self.items() if name.startswith(beginnings))

    @property
    def launches(self) -> int:
        """What the CPU starts on the GPU, but for copies and NCCL: kernels, products, convolutions, memsets, graphs as a whole."""
        return self.named(*_LAUNCHES)

    @property
    def copies(self) -> int:
        return self.named("copy ")

    @property
    def synchronisations(self) -> int:
        """How often the CPU waits for the GPU."""
        return self.named("synchronisation ")

    @property
    def collectives(self) -> int:
        return self.named("nccl ")

    @property
    def in_graphs(self) -> int:
        """What graphs launch without the CPU."""
        return self.named("in a graph ")


@contextmanager
def counted() -> Iterator[Counts]:
    """Count the calls of all threads within the block; the counts are there when it ends.

    Raises:
        RuntimeError: this program does not run on the pretended GPU.
    """
    counts, before = Counts(), _now()
    try:
        yield counts
    finally:
        counts.update(_now() - before)


def _now() -> Counts:
    library = ctypes.CDLL(None)
    if not hasattr(library, "pretended_counts"):
        raise RuntimeError("no GPU is pretended: start the program with `python tests/pretended_gpu/run.py PROGRAM`")
    library.pretended_counts.restype = ctypes.c_char_p
    lines = (line.split("\t", 1) for line in library.pretended_counts().decode().splitlines())
    return Counts({name: int(count) for count, name in lines})
