"""Worker processes that count images for a progress bar, stop when asked, and die with their parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
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
        tasks: sent to other processes.
        workers: processes.
        bar: moves on by one for each image.

    Raises:
        UserError: a worker was killed.
    """
    # Not fork: a caller may hold a DALI pipeline, whose threads do not exist in a forked child.
    context = multiprocessing.get_context("spawn")
    progress = Progress(context.Value("q", 0), context.Value("b", 0))
    before = bar.n
    tasks = list(tasks)
    with ProcessPoolExecutor(max(1, min(workers, len(tasks))), context, _start_worker, (progress,)) as pool:
        try:
            pending: set[Future] = {pool.submit(function, task) for task in tasks}
            while pending:
                done, pending = wait(pending, BAR_SECONDS, FIRST_COMPLETED)
                bar.update(before + progress.images.value - bar.n)
                yield from (future.result() for future in done)
        except BrokenProcessPool:
            raise UserError(
                f"a worker process was killed, all {workers} needed: look for a lack of memory (fewer --workers take less) and run "
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


def _start_worker(progress: Progress) -> None:
    global _progress
    _progress = progress
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group of processes; the parent decides
    parent = parent_process()

    def die_with_parent() -> None:  # also if that is killed: a pool's workers would wait for tasks for ever
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=die_with_parent, daemon=True).start()
