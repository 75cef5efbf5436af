"""Many requests at a time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")


class Threads:
    """Threads that wait for answers. They are started as needed, and do not keep a process from ending.

    Args:
        most: threads, and so requests at a time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._tasks: queue.SimpleQueue[tuple[Future, Callable[[], object]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started = self._pending = 0

    def submit(self, act: Callable[[], Result]) -> Future[Result]:
        """Call ``act`` in a thread."""
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
        """``act`` of each task, at the same time; in place of a result, the exception that was raised."""
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
