"""Measures one case and writes each row as JSON to a pipe as soon as it is there.

    python -m benchmarks.gpu.worker MODULE CONTEXT [PIPE]

Started by ``runner.py``: a process for each rank, of which the first has a pipe.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from benchmarks.gpu.common import Context, Values, reason


def main() -> NoReturn:
    module, told, *pipes = sys.argv[1:]
    told = json.loads(told)
    context = Context(**{**told, "work": Path(told["work"])})
    pipe = os.fdopen(int(pipes[0]), "w") if pipes else None

    def tell(values: Values) -> None:
        if pipe:
            print(json.dumps(values), file=pipe, flush=True)

    code = 0
    try:
        for values in import_module(f"benchmarks.gpu.{module}").measure(context):
            tell(values)
    except BaseException as error:
        traceback.print_exc()
        tell({"failed": reason(error)})
        code = 0 if pipe else 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads and process groups of libraries have nothing more to say


if __name__ == "__main__":
    main()
