"""Record what each rank trained on, step by step, so that any two runs can be compared (``log.samples``).

::

    RUN/samples/rank-00000.jsonl
    {"start": 2, "step": 42, "time": 1760000000.123, "epoch": [0, ...], "position": [640, ...], "sample": [17, ...], "augmentation": ["1f0c...", ...]}

One line per optimizer step, with its micro-batches in order. ``start`` counts the starts of the run, as ``environment.json`` lists them. A
step that was repeated after a resume has several lines; the weights come from the latest by ``time`` (Unix time in seconds).
"""

import json
import mmap
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_hexdigest

from pipeline.augment import BatchRequest
from pipeline.cluster.world import World
from pipeline.files import GrowingFile, write_error
from pipeline.runs import SAMPLES


class SampleLog:
    """This rank's record. Every method raises a ``UserError`` on this rank if its file cannot be written. ``start``: the number
    of this start, counted from 1."""

    def __init__(self, run_dir: Path, world: World, start: int) -> None:
        path = run_dir / SAMPLES / f"rank-{world.rank:05d}.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and path.stat().st_size:  # a kill may have left a part of a line, which would corrupt the next one
                with open(path, "r+b") as file:
                    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:  # the file may be gigabytes
                        whole = content.rfind(b"\n") + 1
                    file.truncate(whole)
        except OSError as error:
            raise write_error(path, error) from None
        self._file, self._start = GrowingFile(path), start
        self.close = self._file.close
        self._step: dict[str, list] = defaultdict(list)

    def add(self, request: BatchRequest) -> None:
        """Add a micro-batch to the current step."""
        self._step["epoch"] += request.epoch.tolist()
        self._step["position"] += request.position.tolist()
        self._step["sample"] += request.index.tolist()
        self._step["augmentation"] += augmentation_digests(request)

    def write(self, step: int) -> None:
        """Write the line of a step. The kernel has it when this returns, so a kill loses nothing."""
        line = {"start": self._start, "step": step, "time": round(time.time(), 3), **self._step}
        self._file.add(json.dumps(line).encode() + b"\n")
        self._file.flush()
        self._step.clear()


def augmentation_digests(request: BatchRequest) -> list[str]:
    """XXH3-64 of all random draws for an image, as 16 hexadecimal digits.

    These are the crop and flip, the filters if they are chosen, and what each augmentation drew, of mixing the partner's sample too. For
    equal samples, equal digests mean equal pixels.
    """
    drawn = [np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint8) for values in request.digested()]
    return [xxh3_64_hexdigest(row.tobytes()) for row in np.concatenate(drawn, axis=1)]  # (bytes,) each
