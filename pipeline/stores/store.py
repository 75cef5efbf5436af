"""Repeat requests to a store where that helps, and give it up where it does not.

A request that fails is repeated after a pause that grows. What that comes to depends on whether the store answers others meanwhile:

- it does: the object is to blame, and after a few tries reading it is an ``OSError``, as of a file that a disk cannot read;
- it answers nobody: the store is away. Requests wait for it, up to a limit, and then all of them end with the same sentence;
- it refuses credentials: all requests end with a sentence at once.
"""

import errno
import logging
import math
import os
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

from pipeline.errors import RANK_LOST, UserError
from pipeline.stores.client import NO_RANGES, Answer, Client, Failure, Kind, Version
from pipeline.stores.opening import check_settings
from pipeline.stores.place import RemotePath

_log = logging.getLogger(__name__)

Task = TypeVar("Task")
Result = TypeVar("Result")

_PART = 8 << 20  # bytes of a request for a whole object
_MOST = 1 << 30  # bytes of an object in memory: a manifest of 2,000,000 shards
REQUESTS_AT_ONCE = 64  # of a process: 1,000 images/s at 50 ms
_TRIES = 8  # 12 s: of a request that a store which answers others does not answer
_SLOW = 100.0  # seconds until that is given up where answers trickle: two tries, which end after 120 s each
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0  # seconds between tries; doubled each time, and drawn from its upper half
_FIRST_THROTTLED, _LONGEST_THROTTLED = 0.5, 30.0  # the same after 503 and 429, for all requests of the process
PATIENCE = 600.0  # seconds without any answer until the store is given up
_FIRST_PATIENCE = 120.0  # the same before the first answer: the address may be wrong
_WARN_AFTER = 20.0  # seconds without any answer until that is said


class StoreFails(UserError):
    """The store as a whole cannot be read or written any more. What was trained so far is to be saved."""


class NoBucket(StoreFails):
    """The store has no bucket, or container, of that name."""


class StoreAway(StoreFails):
    """The store answers nobody. A later start may succeed, so the job may be requeued."""

    exit_code = RANK_LOST


class Threads:
    """Threads, at most so many, that wait for answers. They are started as needed, and do not keep a process from ending."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._tasks: queue.SimpleQueue[tuple[Future, Callable[[], object]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started = self._pending = 0

    def submit(self, act: Callable[[], Result]) -> Future[Result]:
        future: Future[Result] = Future()
        with self._lock:
            self._pending += 1
            begin = self._pending > self._started and self._started < self._most
            self._started += begin
        self._tasks.put((future, act))
        if begin:
            threading.Thread(target=self._work, name=f"store-{self._started}", daemon=True).start()
        return future

    def map(self, act: Callable[[Task], Result], tasks: Iterable[Task]) -> list[Result | BaseException]:
        """``act`` of each task, at the same time; instead of a result, the exception that was raised."""
        waiting = [self.submit(partial(act, task)) for task in tasks]
        return [future.exception() or future.result() for future in waiting]

    def _work(self) -> None:
        while True:
            future, act = self._tasks.get()
            try:
                if not future.set_running_or_notify_cancel():
                    continue
                future.set_result(act())
            except BaseException as error:
                future.set_exception(error)
            finally:
                del future, act  # an answer is not kept until the next task
                with self._lock:
                    self._pending -= 1


class Store:
    """Reads and writes objects of one place, to which names are relative. Thread-safe.

    ``probe`` is an object that is there, to tell a store that is away from an object that is damaged; ``threads`` are for many requests
    at a time.
    """

    def __init__(self, place: RemotePath, probe: str) -> None:
        self.place, self._probe, self._patience = place, probe, PATIENCE
        check_settings(place)
        self._client = Client(place)
        self.threads = Threads(REQUESTS_AT_ONCE)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._answered = time.monotonic()  # when any request was last answered
        self._quiet_until = 0.0  # throttled: no request before
        self._throttled = 0  # in a row
        self._over: StoreFails | None = None
        self._ever = self._warned = False

    def read(self, name: str, begin: int, size: int) -> Answer:
        """Bytes of an object. Raises OSError: they cannot be had; ``strerror`` is the reason; StoreFails: nothing can."""
        return self._repeat(name, lambda: self._client.read(name, begin, size))

    def fetch(self, name: str) -> Answer:
        """A whole object of at most 1 GiB, by ranges, whose answers tell its size, so that none is cut off. Raises as :meth:`read`."""
        parts: dict[int, memoryview] = {}
        size, version = self._take(name, _MOST, parts.__setitem__)
        return Answer(memoryview(b"".join(parts[begin] for begin in sorted(parts))), size, version)

    def download(self, name: str, descriptor: int, most: float = math.inf) -> None:
        """Write a whole object of 1 to ``most`` bytes into an empty file, with no more of it in memory than is in flight.
        Raises as :meth:`fetch`."""

        def write(begin: int, data: memoryview) -> None:
            if os.pwrite(descriptor, data, begin) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)

        disk = os.fstatvfs(descriptor)
        self._take(name, min(most, disk.f_bavail * disk.f_frsize), write)

    def _take(self, name: str, most: float, take: Callable[[int, memoryview], None]) -> tuple[int, Version]:
        """Give ``take`` each part of an object, with its offset; returns the object's size and version."""

        def part(begin: int) -> tuple[int, Version]:
            answer = self.read(name, begin, _PART)
            take(begin, answer.data)
            return answer.size, answer.version

        first = part(0)
        if first[0] > most:
            raise OSError(errno.EFBIG, f"it has {first[0]:,} bytes by the store, more than {most:,}", str(self.place / name))
        for found in self.threads.map(part, range(_PART, first[0], _PART)):
            if isinstance(found, BaseException):
                raise found
            if found != first:
                raise OSError(errno.ESTALE, "it was replaced while it was read", str(self.place / name))
        return first

    def put(self, name: str, data: bytes | Path, mark: str = "", replaces: Version | None = None) -> Version:
        """Write a whole object, with a mark that :meth:`describe` returns.

        Arguments as of :meth:`Client.put`. Raises as :meth:`read`, and FileExistsError if the object is not in the state that the
        write replaces: it may have been this call that wrote it, whose answer was lost.
        """
        return self._repeat(name, lambda: self._client.put(name, data, mark, replaces), about_all=True)

    def describe(self, name: str) -> tuple[int, str]:
        """Bytes and mark of an object that is not empty. Raises as :meth:`read`."""
        return self._repeat(name, lambda: self._client.describe(name), about_all=True)

    def delete(self, names: list[str]) -> None:
        """Remove objects, if they are there. Raises as :meth:`read`."""
        if names:
            self._repeat(names[0], lambda: self._client.delete(names), about_all=True)

    def objects(self) -> dict[str, tuple[int, str]]:
        """Name -> bytes and etag of every object of the place. Raises as :meth:`read`."""
        return self._repeat("", self._client.objects, about_all=True)

    def sizes(self) -> dict[str, int]:
        """Name -> bytes of every object; none where the store does not tell."""
        try:
            return {} if "http" in self.place.scheme else {name: size for name, (size, _) in self.objects().items()}
        except (OSError, StoreFails):
            self._over = None  # reading may be allowed where listing is not
            return {}

    def count(self, kind: Kind) -> None:
        with self._lock:
            self._counts[kind.value] += 1

    def take_counts(self) -> dict[str, int]:
        with self._lock:
            taken, self._counts = self._counts, Counter()
        return dict(taken)

    def _repeat(self, name: str, act: Callable[[], Result], about_all: bool = False) -> Result:
        began, tries, others = time.monotonic(), 0, False
        while True:
            self._wait_for_turn()
            try:
                result = act()
            except Failure as failure:
                tries += failure.kind is not Kind.THROTTLED  # which says nothing of the object
                self.count(failure.kind)
                others = self._judge(name, failure, tries, began, about_all, others)
                self._rest(failure, tries)
            else:
                self._note_answer(result)
                return result

    def _judge(self, name: str, failure: Failure, tries: int, began: float, about_all: bool, others: bool) -> bool:
        """Raise if another try cannot help. Takes and returns whether the store has answered for another object before the try: one
        that came back just after it is not to blame on the object."""
        one_of_many = not about_all and name != self._probe
        if failure.kind is Kind.NO_BUCKET or (failure.kind is Kind.MISSING and not name):  # a list, of no object
            problem = f"{self.place} cannot be opened: {self.place.host} does not exist"
            self._end(NoBucket, problem, "create it, or correct the name or the store's address")
        if failure.kind is Kind.MISSING:
            raise FileNotFoundError(errno.ENOENT, str(failure), str(self.place / name))
        if failure.kind is Kind.CHANGED:
            raise FileExistsError(errno.EEXIST, str(failure), str(self.place / name))
        if failure.kind is Kind.DENIED:
            # A store says so of an object that is not there, too, where it does not let a user list.
            if one_of_many and self._answers_others():
                raise PermissionError(errno.EACCES, str(failure), str(self.place / name))
            remedy = "renew the credentials, or give this user the right to read it, and start again: a run continues from its newest checkpoint"
            self._end(StoreFails, f"{self.place} refuses access ({failure})", remedy)
        if str(failure) == NO_RANGES and not self._ever:
            needed = "does not answer requests for a part of a file (byte ranges), which reading samples requires"
            remedy = "let it, as nginx and Apache do by default, or copy the set into a bucket or a folder"
            self._end(StoreFails, f"the server of {self.place} {needed}", remedy)
        now = time.monotonic()
        if one_of_many and (tries >= _TRIES or now - began > min(_SLOW, self._patience)) and self._answers_others():
            if others:
                raise OSError(errno.EIO, f"{failure}, for {now - began:.0f} s", str(self.place / name))
            _log.warning(f"{self.place / name} is tried a last time ({failure}): the store answers for others")
            return True
        silent = now - max(self._answered, began)
        patience = self._patience if self._ever else min(_FIRST_PATIENCE, self._patience)
        said = f"{self.place} has not answered for {silent:.0f} s ({failure})"
        if silent > patience:
            self._end(StoreAway, said, "check the store and network and start again: a run resumes from its newest checkpoint")
        if silent > _WARN_AFTER and not self._warned:
            self._warned = True
            _log.warning(f"{said}; it is tried again, for {patience:.0f} s")
        return False

    def _answers_others(self) -> bool:
        """Whether the store answers a request for another object now."""
        with suppress(Failure):
            self._note_answer(self._client.read(self._probe, 0, 1))
            return True
        return False

    def _end(self, kind: type[StoreFails], problem: str, remedy: str) -> NoReturn:
        with self._lock:
            self._over = self._over or kind(problem, remedy)
        raise self._over

    def _note_answer(self, result: object) -> None:
        with self._lock:
            self._answered, self._throttled, self._ever, self._warned = time.monotonic(), 0, True, False
            self._counts["requests"] += 1
            if isinstance(result, Answer):
                self._counts["bytes"] += len(result.data)

    def _wait_for_turn(self) -> None:
        """Wait while the store wants fewer requests."""
        while not self._over and (left := self._quiet_until - time.monotonic()) > 0:
            time.sleep(min(left, 0.2))
        if self._over:
            raise self._over

    def _rest(self, failure: Failure, tries: int) -> None:
        if failure.kind is Kind.THROTTLED:
            with self._lock:
                if time.monotonic() >= self._quiet_until:  # one pause for all requests that were in flight
                    self._throttled += 1
                    self._quiet_until = time.monotonic() + _pause(_FIRST_THROTTLED, _LONGEST_THROTTLED, self._throttled)
            return
        end = time.monotonic() + _pause(_FIRST_PAUSE, _LONGEST_PAUSE, tries)
        while (left := end - time.monotonic()) > 0 and not self._over:
            time.sleep(min(left, 0.2))


def _pause(first: float, longest: float, tries: int) -> float:
    """Seconds until the next try: doubled with each, and drawn, so that processes do not come back all at once."""
    return min(longest, first * 2 ** min(tries - 1, 20)) * random.uniform(0.5, 1)
