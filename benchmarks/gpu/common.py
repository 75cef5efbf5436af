"""What a case is told, and how it measures time."""

from __future__ import annotations

import gc
import importlib.util
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Values = dict[str, Any]  # of a row: what was measured, {"skipped": reason} or {"failed": reason}
Rows = Iterator[Values]  # "stage" and "case" in one replace the case's own
REPOSITORY = Path(__file__).parents[2]
PROFILED = 3  # steps of a profile
_AHEAD = 20_000_000  # clock cycles, about 10 ms, that a GPU sleeps while the CPU starts what is timed


@dataclass(frozen=True)
class Context:
    """What a case is told.

    Attributes:
        stage: of the case.
        options: of the case.
        work: folder for its files; ``shards`` is in it after the stage ``data``.
        miniature: the whole path in small, on a CPU too.
        gpus: how many there are; 0 before the stage ``machine``, and on a CPU.
        decode: how the GPU decodes images, as it was tried out: their "regions", the "whole" of them, or not ("cpu"); None: it was not.
    """

    stage: str
    options: Values
    work: Path
    miniature: bool
    gpus: int
    decode: str | None

    @property
    def shards(self) -> Path:
        return self.work / "shards"

    @property
    def classes(self) -> int:
        """ImageNet's number, so that the head costs what it does there."""
        return 10 if self.miniature else 1000

    @property
    def image_size(self) -> int:
        return 64 if self.miniature else 224

    @property
    def batch(self) -> int:
        """Images per process."""
        return self.options.get("micro_batch", 8 if self.miniature else 128)

    @property
    def device(self) -> Any:
        """The first GPU; in miniature perhaps the CPU."""
        import torch

        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def has_module(name: str) -> bool:
    """Whether a module can be found, without importing it."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a parent
        return False


def reason(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def synchronize(device: Any) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def milliseconds(call: Callable[[], object], device: Any, repeats: int = 1) -> float:
    """Time of a call, the mean of ``repeats`` in a row; on a GPU that of its work alone, which waits until the CPU has asked for all."""
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        return 1e3 * (time.perf_counter() - began) / repeats
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_AHEAD)
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / repeats


class PeakMemory:
    """GPU memory that was allocated at most beyond what was there before, in GiB; None on a CPU."""

    def __init__(self, device: Any) -> None:
        import torch

        self._device, self._before = device, 0
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)

    def gib(self) -> float | None:
        import torch

        if self._device.type != "cuda":
            return None
        return (torch.cuda.max_memory_allocated(self._device) - self._before) / 2**30
