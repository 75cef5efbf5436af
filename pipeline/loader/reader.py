"""Read encoded images ahead of time in threads; replace samples that cannot be read or decoded, name each once, limit their number."""

import io
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

import numpy as np
from PIL import Image

from pipeline.augment import BatchRequest
from pipeline.errors import UserError
from pipeline.loader.batches import Batches
from pipeline.stores.store import StoreFails
from pipeline.stream.samples import DamagedSample, Samples

_THREADS = 4  # I/O-bound: keeps a few requests to disk or network in flight without occupying cores
_DECODING = re.compile(r"decode sample #(\d+)|nvImageCodec failure")  # in what DALI reports

Result = TypeVar("Result")


class Ahead(Generic[Result]):
    """Computes ``make(number)`` for endless numbers, ``depth`` ahead in threads, and returns the results in the numbers' order.

    An exception in ``make`` is raised by the :meth:`next` that would have returned its result.
    """

    def __init__(self, make: Callable[[int], Result], numbers: Iterator[int], depth: int, threads: int, name: str) -> None:
        self._make, self._numbers = make, numbers
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._waiting: deque[Future[Result]] = deque()
        self._depth = depth

    def next(self) -> Result:
        while len(self._waiting) <= self._depth:  # depth + 1, because one is returned below
            self._waiting.append(self._pool.submit(self._make, next(self._numbers)))
        return self._waiting.popleft().result()

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._waiting.clear()
        # A method of its owner: the two would keep each other, and all files open, until a garbage collection.
        vars(self).pop("_make", None)


class BadSamples:
    """The bad samples found by this rank. Thread-safe.

    A bad sample is replaced, label included, by the next sample of the set that is not known to be bad. The substitute depends
    on the data only, not on the order in which samples are found.

    Args:
        limit: bad samples to tolerate; one more is an error.
        left_out: substitutes only fill the batch and do not count (evaluation); for the log.
    """

    def __init__(self, shards: Samples, limit: int, left_out: bool = False) -> None:
        self._shards, self._limit, self._left_out = shards, limit, left_out
        self._lock = threading.Lock()
        self._unreported: dict[int, str] = {}
        self._over: UserError | None = None
        self.replacement: dict[int, int] = {}  # bad sample -> its substitute

    def __len__(self) -> int:
        return len(self.replacement)

    def add(self, damage: DamagedSample) -> None:
        """Record a bad sample. Raises UserError: the limit is exceeded, or no good sample is left."""
        with self._lock:
            if self._over:  # other threads raise the same error
                raise self._over
            if damage.index in self.replacement:
                return
            following = (damage.index + 1) % len(self._shards)
            substitute = self.replacement.get(following, following)  # the next sound one after a bad one is its substitute
            if substitute == damage.index:
                problem = f"none of the {len(self._shards)} samples of {self._shards.folder} can be used"
                raise UserError(problem, "restore the files")
            moved = [bad for bad, instead in self.replacement.items() if instead == damage.index]
            self.replacement.update(dict.fromkeys([*moved, damage.index], substitute))  # one step for readers, who need no lock
            instead = f"sample {self._shards.key(substitute)} replaces it"
            self._unreported[damage.index] = f"{damage}; {'it is skipped' if self._left_out else instead}"
            if len(self.replacement) > self._limit:
                many = f"{len(self.replacement)} samples of {self._shards.folder} cannot be used"
                problem = f"{many}, but data.max_bad_samples allows {self._limit}; the last one: {damage}"
                self._over = UserError(problem, "restore the files, or raise data.max_bad_samples")
                raise self._over

    def take_unreported(self) -> dict[int, str]:
        """Sample number -> message of the bad samples found since the last call."""
        with self._lock:
            taken, self._unreported = self._unreported, {}
        return taken


@dataclass(frozen=True)
class Encoded:
    number: int
    request: BatchRequest
    images: list[np.ndarray]  # B of (bytes,) uint8
    replaced: int  # substitutes for bad samples


class Reader(Ahead[Encoded]):
    """Reads encoded batches, ``depth`` of them ahead; ``start`` is the number of the first, or the endless numbers of all."""

    def __init__(self, batches: Batches, bad: BadSamples, start: int | Iterable[int], depth: int) -> None:
        super().__init__(self._read, count(start) if isinstance(start, int) else iter(start), depth, _THREADS, "read")
        self.batches, self.bad = batches, bad
        self.failure: StoreFails | None = None  # of a batch that nobody has asked for yet

    def read(self, number: int) -> Encoded:
        """Read batch ``number`` with substitutes for all samples known to be bad. Thread-safe. Raises as :meth:`BadSamples.add`."""
        self.batches.shards.will_need(self.batches.coming_blocks(number))
        asked_for = request = self.batches.request(number)
        sound: dict[int, np.ndarray] = {}  # where a whole shard is bad, hundreds of substitutes are tried
        while True:
            if not self.bad.replacement.keys().isdisjoint(asked_for.index.tolist()):
                request = self.batches.request(number, self.bad.replacement)
            wanted = request.index.tolist()
            missing = [index for index in dict.fromkeys(wanted) if index not in sound]
            for index, image in zip(missing, self.batches.shards.read_batch(missing)):
                if isinstance(image, DamagedSample):
                    self.bad.add(image)
                else:
                    sound[index] = image
            if sound.keys() >= {*missing}:  # otherwise the request is made again, with substitutes
                images = [sound[index] for index in wanted]
                return Encoded(number, request, images, replaced=int((request.index != asked_for.index).sum()))

    def _read(self, number: int) -> Encoded:
        try:
            return self.read(number)
        except StoreFails as error:
            self.failure = error
            raise


def cause(report: str) -> str:
    """The line of a ``report`` that says what went wrong: DALI's after "encountered:", the last one of a traceback."""
    lines = [line.strip() for line in report.splitlines() if line.strip()] or ["no reason given"]
    found = lines.index("encountered:") + 1 if "encountered:" in lines[:-1] else -1
    return lines[found].rstrip(" .:")


def is_of_decoder(report: str) -> bool:
    """Whether DALI's ``report`` is about an image that its decoder did not take."""
    return _DECODING.search(report) is not None


def undecodable(shards: Samples, batch: Encoded, report: str) -> list[DamagedSample]:
    """The images of a batch that DALI failed to decode on the CPU: the one that its ``report`` names, or all that Pillow cannot decode."""
    named = _DECODING.search(report)
    if named and named[1]:
        places = {int(named[1]): "DALI's decoder failed"}
    else:
        places = {place: reason for place, image in enumerate(batch.images) if (reason := _decoding_error(image))}
    return [shards.damaged(int(batch.request.index[at]), f"cannot be decoded ({reason})") for at, reason in places.items()]


def _decoding_error(image: np.ndarray) -> str | None:
    try:
        Image.open(io.BytesIO(image.tobytes())).convert("RGB")
    except Exception as error:  # Pillow's plugins raise nearly any exception
        return f"{type(error).__name__}: {error}"
    return None
