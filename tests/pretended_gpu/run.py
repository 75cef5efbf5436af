"""Run a Python program on the pretended GPU.

python tests/pretended_gpu/run.py [--counts FILE] PROGRAM ARGUMENTS
python tests/pretended_gpu/run.py [--counts FILE] -m MODULE ARGUMENTS
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # not this folder, whose names would hide others

from pretended_gpu.build import environment, missing  # noqa: E402


def main() -> None:
    arguments, counts = sys.argv[1:], None
    if arguments[:1] == ["--counts"]:
        counts, arguments = Path(arguments[1]).absolute(), arguments[2:]
    if not arguments:
        sys.exit(__doc__)
    if reason := missing():
        sys.exit(f"error: the pretended GPU {reason}.")
    # The same process goes on as the program: its children write no counts.
    os.execve(sys.executable, [sys.executable, *arguments], {**environment(counts), "PRETENDED_GPU_PROCESS": str(os.getpid())})


if __name__ == "__main__":
    main()
