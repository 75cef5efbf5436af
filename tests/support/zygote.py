"""Starts the ranks of a job by forking: PyTorch, DeepSpeed and DALI are imported once, a start takes a second instead of six.

The process that runs this program imports the training and then only waits. A line on its stdin is a request::

    {"module": "pipeline.train", "arguments": [...], "environment": {"RANK": "0", ...},
     "folder": FOLDER, "input": FILE, "output": "FOLDER/0"}

It forks a process that goes on as ``pervit train ... < FILE`` would, with stdout and stderr in FOLDER/0.out and
FOLDER/0.err, and answers with the process id. FOLDER/0.code appears when that process has ended: its exit code, or minus the signal that killed it.

Forking is sound here because nothing was started before it: no thread (OMP_NUM_THREADS=1 keeps BLAS from having some), no DALI
pipeline, no connection. The forked processes are as separate as any others.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import sys
import threading
from pathlib import Path

from pipeline.config import load_config
from pipeline.models import flops
from support.namespaces import enter
from support.small_run import SMALL_MODEL

_POLL_SECONDS = 0.01
_IMPORTED_LATE = (  # by DeepSpeed and the log when a run starts: six seconds
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "functorch.compile",
    "fvcore.nn",
    "setuptools",
    "tensorboard.summary.writer.record_writer",
    "torch.utils.tensorboard",
)
_WITH_THREADS = ("mlflow", "pyarrow", "wandb")  # DeepSpeed takes along what is installed; some start threads
_MODULES = (*_IMPORTED_LATE, "pipeline.train", "pipeline.training.loop", "faults.save_in_a_loop")


def main() -> None:
    sys.modules.update(dict.fromkeys(_WITH_THREADS))  # None: as if they were not there
    for name in _MODULES:
        importlib.import_module(name)
    for name in _WITH_THREADS:
        del sys.modules[name]
    _count_small_models_once()
    assert len(os.listdir("/proc/self/task")) == threading.active_count() == 1, "a thread would not be there after a fork"
    gc.freeze()  # a collection in a forked process would look at all of these objects, and by that copy their memory
    outputs: dict[int, str] = {}  # of the processes that live
    print("ready", flush=True)
    while True:
        if select.select([sys.stdin], [], [], _POLL_SECONDS)[0]:
            line = os.read(0, 1 << 20)  # requests come one at a time, each waits for its answer
            if not line:
                break
            request = json.loads(line)
            files = [
                os.open(f"{request['output']}.{suffix}", os.O_WRONLY | os.O_CREAT | os.O_APPEND) for suffix in ("out", "err")
            ]
            pid = os.fork()
            if pid == 0:
                _become(request, *files)
                return
            for file in files:
                os.close(file)
            outputs[pid] = request["output"]
            print(pid, flush=True)
        _note_ends(outputs)
    for pid in outputs:
        os.kill(pid, signal.SIGKILL)


def _count_small_models_once() -> None:
    """Rank 0 of a start traces its model to count FLOPs, half a second: the models of nearly all starts are counted here."""
    counted = []
    for switches in ((), SMALL_MODEL):
        model = load_config("pervit_t", ["model.image_size=32", "model.num_classes=10", *switches]).model
        words = (model.name, model.image_size, model.num_classes, model.switches)
        counted.append((words, flops.count(*words)))
    count = flops.count

    def known_or_counted(*words: object, **switches: object) -> flops.FlopRow:
        return next((row for known, row in counted if known == words), None) or count(*words, **switches)  # type: ignore[arg-type]

    flops.count = known_or_counted


def _note_ends(outputs: dict[int, str]) -> None:
    while outputs:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        note = Path(f"{outputs.pop(pid)}.code")
        note.with_suffix(".new").write_text(str(os.waitstatus_to_exitcode(status)))
        note.with_suffix(".new").rename(note)


def _become(request: dict, stdout: int, stderr: int) -> None:
    """In the forked process: what ``python -m module arguments`` is."""
    for group in request["enter"].get("cgroups", ()):
        Path(group, "cgroup.procs").write_text("0")
    enter(request["enter"].get("namespaces", []))
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.dup2(os.open(request["input"], os.O_RDONLY), 0)
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = [request["module"], *request["arguments"]]
    from pipeline.command_line import run_command

    module = importlib.import_module(request["module"])
    if hasattr(module, "__path__"):  # a package's program
        module = importlib.import_module(f"{module.__name__}.__main__")
    try:
        run_command(module.main)
    except SystemExit as ended:
        if isinstance(ended.code, int):
            _exit_at_once(ended.code)
        raise


def _exit_at_once(code: int) -> None:
    """End as the interpreter does, but for taking every object apart: that copies all memory shared with the parent, two seconds."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
