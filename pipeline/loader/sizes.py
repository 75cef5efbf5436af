"""Change the images' side with the epoch (``data.size_schedule``): one loader after another.

A loader's memory, DALI's graph and the augmentations are for images of one side. Which side a batch has follows from its number, so that
a run resumes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from pipeline.loader.batches import TrainBatches
from pipeline.loader.loader import Batch, Loader
from pipeline.loader.reader import BadSamples
from pipeline.loader.trial import TrialLoader
from pipeline.stores.store import StoreFails

AnyLoader = Loader[TrainBatches] | TrialLoader


class SizedLoader:
    """Training batches from ``start`` on as a :class:`~pipeline.loader.loader.Loader` yields them.

    Args:
        batches: with the model's ``image_size``.
        open_loader: from batches of one side, the number of the first, and the loader before, if there was one, to a loader.
    """

    def __init__(
        self, batches: TrainBatches, start: int, open_loader: Callable[[TrainBatches, int, AnyLoader | None], AnyLoader]
    ) -> None:
        self.batches, self._number, self._open = batches, start, open_loader
        self._loader = self._opened(None)

    @property
    def bad(self) -> BadSamples:
        return self._loader.bad

    @property
    def decode(self) -> str:
        return self._loader.decode

    @property
    def failure(self) -> StoreFails | None:
        return self._loader.failure

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next batch. Raises as :meth:`Loader.__next__`."""
        if self.batches.side(self._number) != self._loader.batches.image_size:
            self._loader.close()
            self._loader = self._opened(self._loader)
        batch = next(self._loader)
        self._number += 1
        return batch

    def close(self) -> None:
        self._loader.close()

    def _opened(self, before: AnyLoader | None) -> AnyLoader:
        return self._open(replace(self.batches, image_size=self.batches.side(self._number)), self._number, before)
