"""Record what each rank trained on, step by step, so that any two runs can be compared (``log.samples``).

::

    RUN/samples/rank-00000.jsonl
    {"start": 41, "step": 42, "time": 1760000000.123, "epoch": [0, ...], "position": [640, ...], "sample": [17, ...], "augmentation": ["1f0c...", ...]}

One line per optimizer step, with its micro-batches in order. ``start`` is the first step of the start that wrote it. A step
that was repeated after a resume has several lines; the weights come from the latest by ``time`` (Unix time in seconds).
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_hexdigest

from pipeline.augment import BatchRequest
from pipeline.cluster.world import World
from pipeline.files import GrowingFile, write_error
from pipeline.runs import SAMPLES


class SampleLog:
    """This rank's record.

    Args:
        start: the first step of this start, counted from 1.

    Raises:
        UserError: on this rank: its file cannot be written.
    """

    def __init__(self, run_dir: Path, world: World, start: int) -> None:
        path = run_dir / SAMPLES / f"rank-{world.rank:05d}.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _cut_half_a_line(path)
        except OSError as error:
            raise write_error(path, error) from None
        self._file = GrowingFile(path)
        self._start = start
        self._step: dict[str, list] = {}

    def add(self, request: BatchRequest) -> None:
        """Add a micro-batch to the current step."""
        values = {
            "epoch": request.epoch.tolist(),
            "position": request.position.tolist(),
            "sample": request.index.tolist(),
            "augmentation": augmentation_digests(request),
        }
        for name, of_images in values.items():
            self._step.setdefault(name, []).extend(of_images)

    def write(self, step: int) -> None:
        """Write the line of a step. The kernel has it when this returns, so a kill loses nothing.

        Raises:
            UserError: on this rank: the disk is full, or the file was removed.
        """
        line = {"start": self._start, "step": step, "time": round(time.time(), 3), **self._step}
        self._file.add(json.dumps(line).encode() + b"\n")
        self._file.flush()
        self._step = {}

    def close(self) -> None:
        self._file.close()


def augmentation_digests(request: BatchRequest) -> list[str]:
    """XXH3-64 of all random draws for an image, as 16 hexadecimal digits.

    These are the crop and flip, the filters if they are chosen, and what each augmentation drew, of mixing the partner's sample too. For
    equal samples, equal digests mean equal pixels.
    """
    rows = np.concatenate([_bytes_of_images(values) for values in request.digested()], axis=1)  # (B, bytes)
    return [xxh3_64_hexdigest(row.tobytes()) for row in rows]


def _bytes_of_images(values: np.ndarray) -> np.ndarray:
    """(B, ...) of any type -> (B, bytes) uint8."""
    return np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint8)


def _cut_half_a_line(path: Path) -> None:
    """Remove a partial last line, left by a kill, which would corrupt the next one."""
    if not path.exists():
        return
    with open(path, "r+b") as file:
        end = file.seek(0, os.SEEK_END)
        whole = end
        while whole:  # backwards in blocks: the file may be gigabytes, a line is rarely longer than one block
            begin = max(0, whole - 65536)
            file.seek(begin)
            newline = file.read(whole - begin).rfind(b"\n")
            whole = begin + newline + 1 if newline >= 0 else begin
            if newline >= 0:
                break
        if whole < end:
            file.truncate(whole)
