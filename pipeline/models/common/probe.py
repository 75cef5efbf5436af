"""Record inner values of a forward pass, such as attention maps, for analyses.

A module offers a value where its inputs are at hand::

    probe("attention", lambda: (q @ k.transpose(-1, -2) * scale).softmax(-1))  # (B, heads, N, N)

and an analysis records it during a forward pass::

    with recorded("attention") as values:
        model(images)
    values["attention"]  # list with one entry per layer, in order of execution

Outside of ``recorded`` the function is never called: an unused probe costs one lookup. Recording does not change the forward
pass, which still runs the fused kernels. Names in use: ``attention``, ``phi_p``, ``phi_c``, ``gate``, ``position``,
``covariance``; the docstrings of the modules give the shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_recording: ContextVar[dict[str, list[Tensor]] | None] = ContextVar("recording", default=None)


def probe(name: str, compute: Callable[[], Tensor]) -> None:
    """Offer a value: ``compute`` is called only while ``name`` is being recorded. Compiled code (``train.compile``) has no probes."""
    if torch.compiler.is_compiling():
        return
    recording = _recording.get()
    if recording is not None and name in recording:
        recording[name].append(compute().detach())


def is_recording() -> bool:
    """Whether any value is being recorded; compiled code cannot offer one."""
    return _recording.get() is not None


@contextmanager
def recorded(*names: str) -> Iterator[dict[str, list[Tensor]]]:
    """Record the values offered under these names within the ``with`` block."""
    values: dict[str, list[Tensor]] = {name: [] for name in names}
    token = _recording.set(values)
    try:
        yield values
    finally:
        _recording.reset(token)
