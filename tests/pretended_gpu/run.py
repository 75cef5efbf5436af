"""Run a Python program on the pretended GPU.

python tests/pretended_gpu/run.py PROGRAM ARGUMENTS
python tests/pretended_gpu/run.py -m MODULE ARGUMENTS
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # not this folder, whose names would hide others

from pretended_gpu.build import missing, variables  # noqa: E402


def main() -> None:
    if not sys.argv[1:]:
        sys.exit(__doc__)
    if reason := missing():
        sys.exit(f"error: a pretended GPU {reason}.")
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], {**os.environ, **variables()})


if __name__ == "__main__":
    main()
