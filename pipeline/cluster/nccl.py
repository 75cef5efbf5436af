"""Leave the end of a run to the heartbeat: NCCL's watchdog ends no process, but reports what it sees and records the collectives.

NCCL's operations run on the GPU, so one that fails or waits for ever raises no Python exception: the next read of a result
hangs. PyTorch's watchdog thread then aborts the process (SIGABRT, exit code 134), at once after an error and after the group's
timeout otherwise, and the rank cannot name the one that was lost. With :func:`leave_faults_to_the_heartbeat` it only notes the
error; the heartbeat reads it with :func:`failure` and ends the run with a name.

Read from PyTorch 2.13's ProcessGroupNCCL.hpp, and .cpp: ``Watchdog::runLoop``, ``WorkNCCL::handleException``, ``HeartbeatMonitor``.
"""

from __future__ import annotations

import faulthandler
import os
import threading
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from pipeline.cluster.environment import has_agent

# And the rank: a file in the run folder, as `torchfrtrace FOLDER --prefix flight-record-` reads it.
FLIGHT_RECORD = "flight-record-"
_RECORD_SECONDS = 10.0  # to write one, which takes milliseconds; then the GPU hangs, and the process ends without it
# Each of ours with the names that PyTorch reads for the same thing: whichever a user has set wins.
_SAME = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("NCCL_ASYNC_ERROR_HANDLING",),
    "TORCH_FR_BUFFER_SIZE": ("TORCH_NCCL_TRACE_BUFFER_SIZE",),
    "TORCH_FR_DUMP_TEMP_FILE": ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE",),
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": ("TORCH_FR_DUMP_TEMP_FILE",),
}


def leave_faults_to_the_heartbeat(run_folder: Path, timeout: float) -> None:
    """Set NCCL's environment of a run with several processes, where the user has not. Call before the first process group.
    ``run_folder``: gets the flight record of each rank. ``timeout``: seconds that a collective may wait; none of PyTorch's
    threads ends a process before."""
    ours = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # note an error, keep the process (default 3: abort it)
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # the main thread gets a CUDA error too, as an exception that it can report
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(int(timeout)),  # default 480: less than a stalled rank may take
        "TORCH_FR_BUFFER_SIZE": "2000",  # collectives; the default only of newer versions
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        **dict.fromkeys(("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), str(run_folder / FLIGHT_RECORD)),
    }
    of_agent = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"} if has_agent() else {}  # which torchrun sets where the user has not
    users = {name for name, value in os.environ.items() if of_agent.get(name) != value}
    os.environ.update({name: value for name, value in ours.items() if users.isdisjoint((name, *_SAME.get(name, ())))})


def failure() -> str | None:
    """What NCCL's watchdog has noted of a failed or timed-out collective in any group, None while all is well. Asks no GPU."""
    for group in list(dist.distributed_c10d._world.pg_map):
        backend = _nccl_backend(group)
        if backend is not None and (error := backend.get_error()) != c10d.ErrorType.SUCCESS:
            return f"NCCL reports {error.name} in the process group {group.group_name}"
    return None


def _nccl_backend(group: dist.ProcessGroup) -> dist.ProcessGroupNCCL | None:
    if not dist.is_nccl_available() or torch.device("cuda") not in group._device_types:
        return None
    backend = group._get_backend(torch.device("cuda"))
    return backend if isinstance(backend, dist.ProcessGroupNCCL) else None


def write_flight_record(run_folder: Path, rank: int) -> None:
    """Write which collectives this rank has begun and finished into the run folder; best effort, for a process that ends."""
    # A build with NCCL records its collectives apart from those of other backends.
    names = ("_dump_nccl_trace", "_dump_fr_trace") if torch.cuda.is_available() else ("_dump_fr_trace",)
    dump = next((getattr(c10d, name) for name in names if hasattr(c10d, name)), None)
    if dump is None:
        return
    # PyTorch asks CUDA for events and holds the interpreter's lock meanwhile: if the GPU hangs, only a thread in C can end this.
    faulthandler.dump_traceback_later(_RECORD_SECONDS, exit=True)
    try:
        record = dump(includeStackTraces=False)  # with them, the first takes seconds
    except RuntimeError:
        return
    finally:
        faulthandler.cancel_dump_traceback_later()

    def write() -> None:
        with suppress(OSError):  # what ends the run matters more
            (run_folder / f"{FLIGHT_RECORD}{rank}").write_bytes(record)

    writer = threading.Thread(target=write, name="flight-record", daemon=True)  # a file system may hang too
    writer.start()
    writer.join(_RECORD_SECONDS / 2)
