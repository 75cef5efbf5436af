"""Runs one stage and writes a row as JSON to a pipe as soon as it is measured.

    python -m benchmarks.gpu.worker STAGE WORK PIPE [--miniature]

Started by ``runner.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import traceback
from importlib import import_module
from pathlib import Path

from benchmarks.gpu.common import Context, reason
from benchmarks.gpu.stages import BY_NAME


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("stage", choices=BY_NAME)
    parser.add_argument("work", type=Path)
    parser.add_argument("pipe", type=int)
    parser.add_argument("--miniature", action="store_true")
    args = parser.parse_args()
    context = Context(args.stage, args.work, args.miniature)
    with os.fdopen(args.pipe, "w") as pipe:

        def tell(case: str, values: dict) -> None:
            print(json.dumps({"case": case, "values": values}), file=pipe, flush=True)

        try:
            for case, values in import_module(f"benchmarks.gpu.{BY_NAME[args.stage].module}").measure(context):
                tell(case, values)
        except Exception as error:
            traceback.print_exc()
            tell("", {"failed": reason(error)})
        pipe.flush()
        os._exit(0)  # threads and process groups of libraries have nothing more to say


if __name__ == "__main__":
    main()
