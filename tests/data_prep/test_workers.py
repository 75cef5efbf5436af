"""Worker processes: what ends them."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import closing

import pytest
from tqdm import tqdm

from data_prep.workers import run_tasks
from pipeline.errors import UserError
from support.killed_worker import die_with_the_lock


def test_interrupts_at_any_moment_end_it_once() -> None:
    """Guards against Ctrl-C that leaves a lock of the pool taken: the sharder then waited for it for good."""

    def interrupt() -> None:
        for _ in range(60):  # in less time than the tasks take that have begun, which are waited for
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.001)

    sender, results = threading.Thread(target=interrupt), []
    with pytest.raises(KeyboardInterrupt), closing(run_tasks(time.sleep, [0.8] * 100, 2, tqdm(disable=True))) as running:
        for result in running:
            results.append(result)
            if len(results) == 1:
                sender.start()
    sender.join()
    assert 1 <= len(results) < 20
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_worker_killed_while_it_counts_is_one_sentence() -> None:
    """Guards against a sharder that waits for good for a lock which the dead have."""
    with pytest.raises(UserError, match="one of 2 worker processes was killed or ran out of memory"):
        list(run_tasks(die_with_the_lock, range(4), 2, tqdm(disable=True)))
