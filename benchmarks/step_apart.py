"""The authors' form of a training step in a process of its own, as their code has it: nothing that ours sets there serves it."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.step_forms import Setting, authors
from benchmarks.step_timing import Taken, peak_bytes, timed
from pipeline.cluster.world import World
from pipeline.config import Config

_AS_IT_IS = "MALLOC_AS_IT_IS"  # unknown to glibc; with any MALLOC_ variable, pipeline.cluster.host does nothing


class Apart:
    """A step that another process takes; this one waits for it. Call it for one step, which returns what that took."""

    def __init__(self, setting: Setting) -> None:
        method = multiprocessing.get_context("spawn")
        self._ours, theirs = method.Pipe()
        given = (theirs, setting.config, setting.classes, replace(setting.world, rank=0, size=1), torch.get_num_threads())
        self._process = method.Process(target=_serve, args=given, daemon=True)
        os.environ[_AS_IT_IS] = "1"
        try:
            self._process.start()
        finally:
            del os.environ[_AS_IT_IS]

    def __call__(self) -> Taken:
        return self._ask("step")

    def peak_bytes(self) -> int:
        return self._ask("peak")

    def close(self) -> None:
        """End the other process."""
        self._ours.send("end")
        self._process.join()

    def _ask(self, what: str) -> Any:
        self._ours.send(what)
        return self._ours.recv()


def _serve(asked: Connection, config: Config, classes: int, world: World, threads: int) -> None:
    torch.set_num_threads(threads)
    step = authors(Setting(config, classes, world))
    while (what := asked.recv()) != "end":
        asked.send(peak_bytes(step, world.device) if what == "peak" else timed(step, world.device))
