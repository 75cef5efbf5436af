"""Change the images' side with the epoch (``data.size_schedule``): one loader after another.

A loader's memory, DALI's graph and the augmentations are for images of one side. Which side a batch has follows from its number, so that
a run resumes with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pipeline.loader.batches import TrainBatches
from pipeline.loader.loader import Batch, Loader
from pipeline.loader.trial import TrialLoader

AnyLoader = Loader[TrainBatches] | TrialLoader
OpenLoader = Callable[[TrainBatches, int, AnyLoader | None], AnyLoader]


class SizedLoader:
    """Training batches from ``start`` on as a :class:`~pipeline.loader.loader.Loader` yields them, with its attributes.

    ``open_loader`` makes a loader of batches of one side, the number of the first, and the loader before, if there was one.
    ``batches`` have the model's ``image_size``.
    """

    def __init__(self, batches: TrainBatches, start: int, open_loader: OpenLoader) -> None:
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
