"""Inner values for analyses, without a second code path.

A module offers a value where it has what it takes to compute it::

    probe("attention", lambda: (q @ k.transpose(-1, -2) * scale).softmax(-1))  # (B, heads, N, N)

and an analysis collects the values of a forward pass::

    with recorded("attention") as values:
        model(images)
    values["attention"]  # a list, one entry per layer, in the order of the pass

Outside of ``recorded`` the function is never called, so an unused probe costs one lookup. What is recorded is computed
beside the forward pass, which takes the same path either way. Names in use: ``attention``, ``phi_p``, ``phi_c``, ``gate``,
``position``, ``covariance``; each family's docstrings say which it offers and in what shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_recording: ContextVar[dict[str, list[Tensor]] | None] = ContextVar("recording", default=None)


def probe(name: str, compute: Callable[[], Tensor]) -> None:
    """Offer a value; computed only while it is recorded."""
    recording = _recording.get()
    if recording is not None and name in recording:
        recording[name].append(compute().detach())


@contextmanager
def recorded(*names: str) -> Iterator[dict[str, list[Tensor]]]:
    """Collect the values that are offered under these names until the block ends."""
    values: dict[str, list[Tensor]] = {name: [] for name in names}
    token = _recording.set(values)
    try:
        yield values
    finally:
        _recording.reset(token)
