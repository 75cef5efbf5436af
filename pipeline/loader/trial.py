"""Decode on the GPU and on the CPU in turns, measure what a step takes with each, keep the faster (``data.decode=auto``);
change the images' side with the epoch (``data.size_schedule``).

What counts is a step of training, not the loader alone: a GPU that decodes trains less meanwhile. A loader is a pure function of
the number of a batch, so two of them can produce the stream together, turn by turn, or one after the other.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from pipeline.loader.batches import TrainBatches
from pipeline.loader.loader import AUTO, CPU, GPU, Batch, Loader
from pipeline.loader.reader import BadSamples
from pipeline.stores.store import StoreFails

_ROUNDS = 2  # turns of each; the better one counts, so that something slow in one of them, such as an evaluation, does not
_MEASURED = 10  # micro-batches at the end of a turn

OpenLoader = Callable[[Iterator[int], str, BadSamples], Loader[TrainBatches]]
Seconds = dict[str, float]  # of a micro-batch, by data.decode


@dataclass(frozen=True)
class Turns:
    """How the batches from ``start`` on are divided: two loaders in turns, at first, and one for the rest."""

    start: int  # number of the first batch
    settling: int  # batches at the beginning of a turn that are not measured, because they may have been ready before
    measured: int = _MEASURED  # those after them

    @classmethod
    def of_steps(cls, start: int, prefetch: int, batches_per_step: int) -> "Turns":
        """Turns of whole steps. A loader holds ``prefetch`` finished batches, as many decoded ones, and those in the making."""
        settling, measured = (math.ceil(least / batches_per_step) * batches_per_step for least in (2 * prefetch + 2, _MEASURED))
        return cls(start, settling, measured)

    @property
    def size(self) -> int:
        return self.settling + self.measured

    @property
    def total(self) -> int:
        return 2 * _ROUNDS * self.size

    def numbers(self, place: int) -> Iterator[int]:
        """The numbers of the batches of the loader at ``place``, 0 or 1, if it produces all batches after the last turn."""
        for turn in range(place, 2 * _ROUNDS, 2):
            first = self.start + turn * self.size
            yield from range(first, first + self.size)
        yield from count(self.start + self.total)


class TrialLoader:
    """Training batches as a :class:`~pipeline.loader.loader.Loader` yields them, decoded here and there in turns at first.

    Args:
        turns: where to begin, and the length of a turn.
        open_loader: from the numbers of its batches and ``data.decode``, "gpu" or "cpu", to a loader.
        choose: from the seconds that a batch took, by ``data.decode``, to the one to keep. Called once, in the same call of
            :meth:`__next__` on every rank, so that it can ask the others.
    """

    def __init__(
        self, batches: TrainBatches, turns: Turns, bad: BadSamples, open_loader: OpenLoader, choose: Callable[[Seconds], str]
    ) -> None:
        self.batches, self.bad, self.decode = batches, bad, AUTO  # then what is kept
        self._turns, self._choose = turns, choose
        self._loaders = {decode: open_loader(turns.numbers(place), decode, bad) for place, decode in enumerate((GPU, CPU))}
        self._seconds: dict[str, list[float]] = {decode: [] for decode in self._loaders}
        self._taken, self._since = 0, 0.0

    @property
    def failure(self) -> StoreFails | None:
        return next((loader.failure for loader in self._loaders.values() if loader.failure), None)

    def __next__(self) -> Batch:
        """The next batch. Raises as :meth:`Loader.__next__`."""
        return next(self._trial() if self.decode == AUTO else self._loaders[self.decode])

    def close(self) -> None:
        for loader in self._loaders.values():
            loader.close()

    def _trial(self) -> Loader[TrainBatches]:
        """The loader of the next batch; notes the time. A step is over when the next batch is asked for."""
        now, order = time.perf_counter(), list(self._loaders)
        turn, within = divmod(self._taken, self._turns.size)
        if within == 0 and turn:
            self._seconds[order[(turn - 1) % 2]].append((now - self._since) / self._turns.measured)
        if within == self._turns.settling:
            self._since = now
        self._taken += 1
        if turn < 2 * _ROUNDS:
            return self._loaders[order[turn % 2]]
        self.decode = self._choose({decode: min(seconds) for decode, seconds in self._seconds.items()})
        self._loaders.pop(CPU if self.decode == GPU else GPU).close()
        return self._loaders[self.decode]


AnyLoader = Loader[TrainBatches] | TrialLoader
OpenSized = Callable[[TrainBatches, int, AnyLoader | None], AnyLoader]


class SizedLoader:
    """Training batches from ``start`` on as a :class:`~pipeline.loader.loader.Loader` yields them, with its attributes.

    Which side a batch has follows from its number, so that a run resumes with it; DALI's graph and augmentations have one.
    ``open_loader`` makes a loader of batches of one side, the number of the first, and the loader before, if there was one.
    ``batches`` have the model's ``image_size``.
    """

    def __init__(self, batches: TrainBatches, start: int, open_loader: OpenSized) -> None:
        self._batches, self._number, self._open = batches, start, open_loader
        self._loader = self._opened(None)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_loader"], name)

    def __next__(self) -> Batch:
        """The next batch. Raises as :meth:`Loader.__next__`."""
        if self._batches.side(self._number) != self._loader.batches.image_size:
            self._loader.close()
            self._loader = self._opened(self._loader)
        batch = next(self._loader)
        self._number += 1
        return batch

    def _opened(self, before: AnyLoader | None) -> AnyLoader:
        return self._open(replace(self._batches, image_size=self._batches.side(self._number)), self._number, before)
