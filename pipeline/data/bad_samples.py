"""Handling of samples that cannot be read or decoded: substitute a neighbour, log each once, limit their number."""

from __future__ import annotations

import io
import re
import threading

import numpy as np
from PIL import Image

from pipeline.data.samples import Samples
from pipeline.data.shards import DamagedSample
from pipeline.errors import UserError


class BadSamples:
    """The bad samples found by this rank. Thread-safe.

    A bad sample is replaced, label included, by the next sample of the set that is not known to be bad. The substitute depends
    on the data only, not on the order in which samples are found.

    Args:
        shards: the split.
        limit: bad samples to tolerate; one more is an error.
        left_out: substitutes only fill the batch and do not count (evaluation); for the log.

    Attributes:
        replacement: bad sample -> its substitute.
    """

    def __init__(self, shards: Samples, limit: int, left_out: bool = False) -> None:
        self._shards, self._limit, self._left_out = shards, limit, left_out
        self._lock = threading.Lock()
        self._unreported: dict[int, str] = {}
        self._over: UserError | None = None
        self._replaced_by: dict[int, list[int]] = {}  # substitute -> the bad samples that it replaces
        self.replacement: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.replacement)

    def add(self, damage: DamagedSample) -> None:
        """Record a bad sample.

        Raises:
            UserError: the limit is exceeded, or no good sample is left.
        """
        with self._lock:
            if self._over:  # other threads raise the same error
                raise self._over
            if damage.index in self.replacement:
                return
            substitute = self._next_sound(damage.index)
            moved = [*self._replaced_by.pop(damage.index, []), damage.index]
            self._replaced_by.setdefault(substitute, []).extend(moved)
            self.replacement.update(dict.fromkeys(moved, substitute))  # one step for other threads: readers need no lock
            instead = f"sample {self._shards.key(substitute)} replaces it"
            self._unreported[damage.index] = f"{damage}; {'it is skipped' if self._left_out else instead}"
            if len(self.replacement) > self._limit:
                self._over = UserError(
                    f"{len(self.replacement)} samples of {self._shards.folder} cannot be used, data.max_bad_samples allows {self._limit}; "
                    f"the last one: {damage}",
                    "restore the files, or raise data.max_bad_samples",
                )
                raise self._over

    def take_unreported(self) -> dict[int, str]:
        """Sample number -> message of the bad samples found since the last call."""
        with self._lock:
            taken, self._unreported = self._unreported, {}
        return taken

    def _next_sound(self, sample: int) -> int:
        following = (sample + 1) % len(self._shards)
        found = self.replacement.get(following, following)  # the next sound one after a bad one is its substitute
        if found != sample:
            return found
        raise UserError(
            f"none of the {len(self._shards)} samples of {self._shards.folder} can be used, at least 1 needed",
            "restore the files",
        )


def undecodable(shards: Samples, indices: np.ndarray, images: list[np.ndarray], report: str) -> list[DamagedSample]:
    """Find the images of a batch that DALI failed to decode.

    Args:
        shards: the split.
        indices: (B,) sample numbers.
        images: B encoded images.
        report: DALI's error message. If it does not name a position in the batch, every image is tried with Pillow.
    """
    named = re.search(r"decode sample #(\d+)", report)
    if named:
        places = {int(named[1]): "DALI's decoder failed"}
    else:
        places = {place: reason for place, image in enumerate(images) if (reason := _decoding_error(image))}
    return [shards.damaged(int(indices[place]), f"cannot be decoded ({reason})") for place, reason in places.items()]


def _decoding_error(image: np.ndarray) -> str | None:
    """The reason why Pillow cannot decode an image; None if it can."""
    try:
        Image.open(io.BytesIO(image.tobytes())).convert("RGB")
    except Exception as error:  # Pillow's plugins raise nearly any exception
        return f"{type(error).__name__}: {error}"
    return None
