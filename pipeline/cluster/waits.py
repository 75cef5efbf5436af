"""Add up how long this rank waits for others: a slow rank is late at every sum over the ranks, and the others wait for it there.

Under ZeRO they do so within their own passes, else before the update. A rank's own work is what remains of a step:

- Over gloo, without the wall time that the main thread spends in ``Work.wait``, through which all collectives of PyTorch and
  DeepSpeed go. Not CPU time: a rank that is stopped, reads slowly or shares its core is slow without using any.
- On a GPU, whose host does not wait, without the time between two CUDA events around the place where the training stream waits for
  the last sum of gradients. They are read when the device has passed them. ZeRO 3, which gathers weights in its passes, and steps
  that are one CUDA graph have no such place: nothing is known of them.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

_spent = {"cpu": 0.0, "cuda": 0.0}  # seconds in waits so far
_enclosing: list[Any] = []  # pairs of events around waits of the device that were not read yet, the oldest first


def count_waits() -> None:
    """Begin to count the waits of the main thread for other ranks over gloo; a second call changes nothing."""
    wait: Any = dist.Work.wait

    def counted_wait(work: dist.Work, *arguments: Any, **more: Any) -> bool:
        began = time.perf_counter()
        try:
            return wait(work, *arguments, **more)
        finally:
            if threading.current_thread() is threading.main_thread():
                _spent["cpu"] += time.perf_counter() - began

    if wait.__name__ != counted_wait.__name__:
        dist.Work.wait = counted_wait  # type: ignore[method-assign, assignment]


@contextmanager
def device_waits() -> Iterator[None]:
    """Count what the current CUDA stream waits for in the block, unless a graph is captured; elsewhere do nothing."""
    if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
        yield
        return
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    yield
    after.record()
    _enclosing.append((before, after))


def waited(device: torch.device) -> float:
    """Seconds that this rank has waited for others so far, as far as is known."""
    while _enclosing and _enclosing[0][1].query():
        before, after = _enclosing.pop(0)
        _spent["cuda"] += before.elapsed_time(after) / 1000
    return _spent[device.type]
