"""Worker processes that count images for a progress bar, stop when asked, and die with their parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from multiprocessing import connection, parent_process
from multiprocessing.sharedctypes import Synchronized
from typing import TypeVar

from tqdm import tqdm

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


def run_tasks(function: Callable[[Task], Result], tasks: Iterable[Task], workers: int, bar: tqdm) -> Iterator[Result]:
    """``function`` of each task, as they are done, in whatever order. To be closed when left early: that stops the workers.

    Args:
        function: of a module; calls :func:`count_image`.
        tasks: sent to other processes; may be made while the first ones are worked on.
        workers: processes.
        bar: moves on by one for each image.

    Raises:
        UserError: a worker was killed.
    """
    # Not fork: a caller may hold a DALI pipeline, whose threads do not exist in a forked child.
    context = multiprocessing.get_context("spawn")
    progress = Progress(context.Value("q", 0), context.Value("b", 0))
    before = bar.n
    with ProcessPoolExecutor(workers, context, _start_worker, (progress,)) as pool:
        try:
            tasks = iter(tasks)
            with _interrupts_held():  # the first task starts the workers, which inherit this: Ctrl-C is the parent's business
                pending: set[Future] = {pool.submit(function, task) for task in islice(tasks, 1)}
            pending |= {pool.submit(function, task) for task in tasks}
            while pending:
                done, pending = wait(pending, BAR_SECONDS, FIRST_COMPLETED)
                bar.update(before + progress.images.value - bar.n)
                yield from (future.result() for future in done)
        except (BrokenProcessPool, MemoryError):
            raise UserError(
                f"a worker process was killed or ran out of memory, all {workers} needed: give them more memory or pass fewer --workers, then run "
                f"the same command again."
            ) from None
        except BaseException:
            progress.stop.value = 1
            pool.shutdown(cancel_futures=True)
            raise


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
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C waits until the end of the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(progress: Progress) -> None:
    global _progress
    _progress = progress
    parent = parent_process()

    def die_with_parent() -> None:  # also if that is killed: a pool's workers would wait for tasks for ever
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=die_with_parent, daemon=True).start()
