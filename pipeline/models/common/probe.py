"""Record inner values of a forward pass, such as attention maps, for analyses.

A module offers a value where its inputs are at hand::

    probe("attention", lambda: (q @ k.transpose(-1, -2) * scale).softmax(-1))  # (B, heads, N, N)

and an analysis records it during a forward pass, or looks at each value as it comes with :func:`observed`::

    with recorded("attention") as values:
        model(images)
    values["attention"]  # list with one entry per layer, in order of execution

Outside of both the function is never called, and neither changes the forward pass, which still runs the fused kernels. Names in
use: ``attention``, ``phi_p``, ``phi_c``, ``gate``, ``position``, ``covariance``; the docstrings of the modules give the shapes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

Observer = Callable[[str, Tensor], None]
_observing: ContextVar[tuple[Observer, frozenset[str]] | None] = ContextVar("observing", default=None)


def probe(name: str, compute: Callable[[], Tensor]) -> None:
    """Offer a value: ``compute`` is called only while ``name`` is being recorded. Compiled code (``train.compile``) has no probes."""
    if torch.compiler.is_compiling():
        return
    observing = _observing.get()
    if observing is not None and name in observing[1]:
        observing[0](name, compute().detach())


def is_recording() -> bool:
    """Whether any value is being recorded; compiled code cannot offer one."""
    return _observing.get() is not None


@contextmanager
def observed(observer: Observer, *names: str) -> Iterator[None]:
    """Call ``observer(name, value)`` for the values offered under these names within the ``with`` block, in order of execution."""
    token = _observing.set((observer, frozenset(names)))
    try:
        yield
    finally:
        _observing.reset(token)


@contextmanager
def recorded(*names: str) -> Iterator[dict[str, list[Tensor]]]:
    """Record the values offered under these names within the ``with`` block."""
    values: dict[str, list[Tensor]] = {name: [] for name in names}
    with observed(lambda name, value: values[name].append(value), *names):
        yield values
