"""Run worker processes that report progress, stop on request, and exit with their parent."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection, parent_process
from multiprocessing.sharedctypes import Synchronized
from typing import TypeVar

from tqdm import tqdm

from pipeline.errors import UserError, counted

BAR_SECONDS = 0.2  # between two updates of the progress bar

Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Progress:
    """Shared between the workers and their parent: the number of images done, and the request to stop.

    The parent takes no lock: a worker that is killed while it has one, for example for its memory, never gives it back.
    """

    images: Synchronized  # locked by workers, which add to it
    stop: ctypes.c_byte

    def count(self) -> int:
        """Images done."""
        return self.images.get_obj().value


class Stopped(Exception):
    """The parent asked the workers to stop."""


_progress: Progress | None = None  # of this worker process


def run_tasks(
    function: Callable[[Task], Result], tasks: Iterable[Task], workers: int, bar: tqdm
) -> Generator[Result, None, None]:
    """Yield ``function(task)`` for each task, in order of completion. Close the generator to stop the workers early.

    Args:
        function: picklable; calls :func:`count_image`.
        tasks: picklable; consumed in this process, all before the first result is awaited.
        workers: number of processes.
        bar: advanced by one per image.

    Raises:
        UserError: a worker was killed or ran out of memory, or /dev/shm is full.
    """
    # spawn, not fork: the caller may hold a DALI pipeline, whose threads would be missing in a forked child.
    context = multiprocessing.get_context("spawn")
    try:
        with _interrupts_held_back():  # this starts multiprocessing's resource tracker
            progress = Progress(context.Value("q", 0), context.Value("b", 0, lock=False))
        executor = ProcessPoolExecutor(workers, context, _start_worker, (progress,))
    except OSError as error:
        raise UserError(
            f"semaphores for {counted(workers, 'worker process')} cannot be created in /dev/shm ({error.strerror})",
            "free some space on it",
        ) from None
    before = bar.n
    with interrupts_noted() as raise_if_interrupted, executor as pool:
        try:
            pending = set()
            for task in tasks:
                pending.add(_submit(pool, function, task))
                raise_if_interrupted()
            while pending:
                done, pending = wait(pending, BAR_SECONDS, FIRST_COMPLETED)
                raise_if_interrupted()
                bar.update(before + progress.count() - bar.n)
                yield from (future.result() for future in done)
            raise_if_interrupted()
        except BaseException as error:
            progress.stop.value = 1
            pool.shutdown(cancel_futures=True)
            if not isinstance(error, (BrokenProcessPool, MemoryError)):
                raise
            raise UserError(
                f"one of {counted(workers, 'worker process')} was killed or ran out of memory",
                "provide more memory or pass fewer --workers, then run the same command again",
            ) from None


def stop_like_ctrl_c() -> None:
    """Make SIGTERM and SIGHUP (closed terminal) raise KeyboardInterrupt like Ctrl-C, unless ignored, as under ``nohup``."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


def count_image() -> None:
    """Count one image; called by a worker after each.

    Raises:
        Stopped: the parent asked the workers to stop.
    """
    if _progress is None:  # not in a worker
        return
    with _progress.images.get_lock():
        _progress.images.value += 1
    stop_if_asked()


def stop_if_asked() -> None:
    """Called by a worker where it waits for something.

    Raises:
        Stopped: the parent asked the workers to stop.
    """
    if _progress is not None and _progress.stop.value:
        raise Stopped


@contextmanager
def interrupts_noted() -> Iterator[Callable[[], None]]:
    """Within the block, Ctrl-C and what counts as it raise KeyboardInterrupt only where the block calls what it was given.

    The futures of a pool have locks. An interrupt just after this thread took one left it locked, and the pool waited for it for good.
    """
    noted = threading.Event()

    def raise_if_interrupted() -> None:
        if noted.is_set():
            raise KeyboardInterrupt

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.default_int_handler:
                before[number] = signal.signal(number, lambda *_: noted.set())
    try:
        yield raise_if_interrupted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Block SIGINT and SIGHUP, so that processes started within never receive them: the parent handles these.

    SIGTERM stays unblocked: the pool uses it to terminate its workers when one of them was killed.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _submit(pool: ProcessPoolExecutor, function: Callable, task: object) -> Future:
    with _interrupts_held_back():  # this may start a worker
        return pool.submit(function, task)


def _start_worker(progress: Progress) -> None:
    global _progress
    _progress = progress
    parent = parent_process()
    assert parent  # this is a worker

    def die_with_parent() -> None:  # even if the parent was killed, where the pool's workers would wait for tasks forever
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=die_with_parent, daemon=True).start()
