"""``pipeline.train`` with another backend of ``torch.compile``, and another place for what it compiles than the user's own.

The first two arguments are the backend and the place. ``inductor`` is the real one. ``aot_eager`` traces forward and backward
passes as Inductor has it and runs PyTorch's own kernels, which needs no compiler. ``fails_on_RANK`` is that, but raises on a rank.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from pipeline import train
from pipeline.training import compiling
from pipeline.training.compiling import INDUCTOR


def main() -> int:
    backend, os.environ[INDUCTOR] = sys.argv.pop(1), sys.argv.pop(1)
    if backend.startswith("fails_on_"):
        compiling.BACKEND = _fail if backend == f"fails_on_{os.environ['RANK']}" else "aot_eager"
    else:
        compiling.BACKEND = backend
    return train.main()


def _fail(graph: Any, inputs: Any) -> Any:
    raise OSError("no compiler on this rank")
