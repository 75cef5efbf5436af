"""Worker processes that count images for a progress bar, stop when asked, and die with their parent."""

from __future__ import annotations

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

from data_prep import counted
from pipeline.errors import UserError

BAR_SECONDS = 0.2  # between two updates

Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Progress:
    """What workers and their parent share: the count of images done, and whether to stop."""

    images: Synchronized
    stop: Synchronized


class Stopped(Exception):
    """The parent asked the workers to stop."""


_progress: Progress | None = None  # of this worker process


def run_tasks(
    function: Callable[[Task], Result], tasks: Iterable[Task], workers: int, bar: tqdm
) -> Generator[Result, None, None]:
    """``function`` of each task, as they are done, in whatever order. To be closed when left early: that stops the workers.

    Args:
        function: of a module; calls :func:`count_image`.
        tasks: sent to other processes; may be made while the first ones are worked on.
        workers: processes.
        bar: moves on by one for each image.

    Raises:
        UserError: a worker was killed, or /dev/shm is full.
    """
    # Not fork: a caller may hold a DALI pipeline, whose threads do not exist in a forked child.
    context = multiprocessing.get_context("spawn")
    try:
        with _interrupts_held_back():  # this starts multiprocessing's resource tracker
            progress = Progress(context.Value("q", 0), context.Value("b", 0))
        executor = ProcessPoolExecutor(workers, context, _start_worker, (progress,))
    except OSError as error:
        raise UserError(
            f"semaphores for {counted(workers, 'worker process')} cannot be made in /dev/shm ({error.strerror}), a few kB there needed: "
            f"free some space on it."
        ) from None
    before = bar.n
    with executor as pool:
        try:
            pending = {_submit(pool, function, task) for task in tasks}
            while pending:
                done, pending = wait(pending, BAR_SECONDS, FIRST_COMPLETED)
                bar.update(before + progress.images.value - bar.n)
                yield from (future.result() for future in done)
        except BaseException as error:
            progress.stop.value = 1
            pool.shutdown(cancel_futures=True)
            if not isinstance(error, (BrokenProcessPool, MemoryError)):
                raise
            raise UserError(
                f"a worker process was killed or ran out of memory, all {workers} needed: give them more memory or pass fewer "
                f"--workers, then run the same command again."
            ) from None


def stop_like_ctrl_c() -> None:
    """Have SIGTERM, and the SIGHUP of a terminal that is closed, stop this process as Ctrl-C does; ``nohup`` stays in force."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


def count_image() -> None:
    """Called by a worker after each image.

    Raises:
        Stopped: the parent asked for it.
    """
    if _progress is None:  # not in a worker
        return
    with _progress.images.get_lock():
        _progress.images.value += 1
    if _progress.stop.value:
        raise Stopped


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Processes that are started meanwhile never get Ctrl-C and SIGHUP: these are the parent's business.

    Not SIGTERM, with which a pool ends its workers when one of them was killed.
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

    def die_with_parent() -> None:  # also if that is killed: a pool's workers would wait for tasks for ever
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=die_with_parent, daemon=True).start()
