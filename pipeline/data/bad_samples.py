"""Samples that cannot be read or decoded: remembered, replaced by a neighbour, named once, limited in number."""

from __future__ import annotations

import io
import re
import threading

import numpy as np
from PIL import Image

from pipeline.data.plan import Samples
from pipeline.data.shards import DamagedSample
from pipeline.errors import UserError


class BadSamples:
    """The bad samples that this process has met; threads may call every method.

    A bad sample is replaced by the next one in the set that is not known as bad, with that one's label: on the same disk
    always the same.

    Args:
        shards: the set.
        limit: how many may be met; one more is an error.
        left_out: the substitutes only fill the batch (an evaluation); for the log.

    Attributes:
        replacement: bad sample -> the one to take instead.
    """

    def __init__(self, shards: Samples, limit: int, left_out: bool = False) -> None:
        self._shards, self._limit, self._left_out = shards, limit, left_out
        self._lock = threading.Lock()
        self._unreported: dict[int, str] = {}
        self._over: UserError | None = None
        self.replacement: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.replacement)

    def add(self, damage: DamagedSample) -> None:
        """Note a bad sample.

        Raises:
            UserError: there are more than the limit, or no good sample is left.
        """
        with self._lock:
            if self._over:  # threads that find more of them say the same
                raise self._over
            if damage.index in self.replacement:
                return
            replacement = {**self.replacement, damage.index: damage.index}
            for sample, substitute in replacement.items():
                if substitute == damage.index:
                    replacement[sample] = self._next_sound(substitute, replacement)
            self.replacement = replacement  # replaced whole: readers need no lock
            instead = f"sample {self._shards.key(replacement[damage.index])} takes its place"
            self._unreported[damage.index] = f"{damage}; {'it is left out' if self._left_out else instead}"
            if len(replacement) > self._limit:
                self._over = UserError(
                    f"{len(replacement)} samples of {self._shards.folder} cannot be used, data.max_bad_samples allows {self._limit}; "
                    f"the last one: {damage}: restore the files, or raise data.max_bad_samples."
                )
                raise self._over

    def take_unreported(self) -> dict[int, str]:
        """Sample and sentence of those that were met since the last call."""
        with self._lock:
            taken, self._unreported = self._unreported, {}
        return taken

    def _next_sound(self, sample: int, bad: dict[int, int]) -> int:
        for step in range(1, len(self._shards)):
            candidate = (sample + step) % len(self._shards)
            if candidate not in bad:
                return candidate
        raise UserError(
            f"none of the {len(self._shards)} samples of {self._shards.folder} can be used, at least 1 needed: restore the files."
        )


def undecodable(shards: Samples, indices: np.ndarray, images: list[np.ndarray], report: str) -> list[DamagedSample]:
    """Which images of a batch DALI failed on.

    Args:
        indices: (B,) sample numbers.
        images: B encoded images.
        report: DALI's error. It names a sample by its place in the batch, or none; then Pillow tries each.
    """
    named = re.search(r"decode sample #(\d+)", report)
    if named:
        places = {int(named[1]): "DALI's decoder gave up"}
    else:
        places = {place: reason for place, image in enumerate(images) if (reason := _decoding_error(image))}
    return [shards.damaged(int(indices[place]), f"cannot be decoded ({reason})") for place, reason in places.items()]


def _decoding_error(image: np.ndarray) -> str | None:
    try:
        Image.open(io.BytesIO(image.tobytes())).convert("RGB")
    except Exception as error:  # Pillow raises whatever its plugins raise
        return f"{type(error).__name__}: {error}"
    return None
