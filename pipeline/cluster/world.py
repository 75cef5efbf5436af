"""Join the other ranks: choose this process's device, initialize torch.distributed and DeepSpeed.

One process per GPU, or per share of the CPU cores where there is none.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeline.cluster.environment import Place, read_place, slurm_granted_gpus
from pipeline.cluster.exchange import broadcast_json, gather_json
from pipeline.cluster.host import bind_near_gpu, gpu_is_usable, keep_freed_memory
from pipeline.cluster.nccl import leave_faults_to_the_heartbeat
from pipeline.cluster.rendezvous import connect
from pipeline.errors import UserError

DEFAULT_TIMEOUT = 1800.0  # seconds per collective where no run sets its own: torch.distributed's default for gloo
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class World:
    """This process's place in the job, and the collectives that need no more than that."""

    rank: int
    size: int
    device: torch.device
    cpu_threads: int  # this rank's share of the node's cores

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes logs and files."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""
        dist.barrier()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """All-reduce: the sum over all ranks, in place, on the world's device. Collective."""
        dist.all_reduce(values)
        return values

    def stack(self, values: torch.Tensor) -> torch.Tensor:
        """All-gather a tensor of the same shape on every rank, on the world's device: (size, *shape) in rank order. Collective."""
        gathered = values.new_empty(self.size, *values.shape)
        dist.all_gather(list(gathered), values)
        return gathered

    def from_main(self, value: object) -> Any:
        """Plain data of rank 0, on every rank, see :func:`pipeline.cluster.exchange.broadcast_json`. Collective."""
        return broadcast_json(value, self.rank, self.device)

    def gather(self, value: object) -> list:
        """All-gather plain data in rank order, see :func:`pipeline.cluster.exchange.gather_json`. Collective."""
        return gather_json(value, self.size, self.device)


def init_world(timeout: float = DEFAULT_TIMEOUT, run_folder: Path | None = None) -> World:
    """Find rank and world size, choose the device, initialize torch.distributed and DeepSpeed. Collective.

    Args:
        timeout: seconds that a collective may wait for a rank. A run passes ``distributed.collective_timeout``, so that the
            heartbeat names a rank that hangs before PyTorch ends those that wait for it.
        run_folder: of a run with a heartbeat, which then ends it after a fault instead of NCCL's watchdog.

    Raises:
        UserError: several processes, but a variable they need is missing or malformed.
        NotConnected: the ranks did not find each other.
    """
    place = read_place()
    cpu_threads = place.cpu_threads
    if gpu_is_usable():
        device = torch.device("cuda", _gpu_index(place))
        cpu_threads = min(cpu_threads, len(bind_near_gpu(device.index, torch.cuda.device_count(), place.local_size)))
        torch.cuda.set_device(device)
        os.environ["LOCAL_RANK"] = str(device.index)  # DeepSpeed takes it for the GPU's index
        # All batches of a run have one size: let cuDNN try its algorithms in the first step, unless that choice must not vary.
        torch.backends.cudnn.benchmark = not torch.are_deterministic_algorithms_enabled()
        torch.backends.cudnn.allow_tf32 = False  # Φp needs full fp32: TF32 gives errors of up to 5 %
    else:
        if place.rank == 0 and slurm_granted_gpus():
            _log.info(
                "note: Slurm granted this task GPUs, but PyTorch finds none: running on the CPU (--gpus-per-node=0 asks for none)"
            )
        device = torch.device("cpu")
        torch.set_num_threads(cpu_threads)
        keep_freed_memory()
    if run_folder and place.size > 1:
        leave_faults_to_the_heartbeat(run_folder, timeout)
    _connect("nccl" if device.type == "cuda" else "gloo", place, device, timedelta(seconds=timeout))
    return World(place.rank, place.size, device, cpu_threads)


def _gpu_index(place: Place) -> int:
    """Index of this rank's GPU among the visible ones: all of the node's, or one where Slurm binds a GPU to each task."""
    visible = torch.cuda.device_count()
    if visible == 1 and "SLURM_STEP_ID" in os.environ:
        return 0
    if place.local_rank >= visible:
        raise UserError(
            f"a node must have one GPU per process, got {visible} GPUs for {place.local_size} processes",
            f"start {visible} processes per node",
        )
    return place.local_rank


def _connect(backend: str, place: Place, device: torch.device, timeout: timedelta) -> None:
    # DeepSpeed 0.19 calls functions that PyTorch 2.13 deprecates; users cannot change that.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    with quiet_deepspeed():
        # Imported before there is a process group: what exists then becomes a default argument of its functions, which would
        # keep the group and its threads beyond `disconnect`.
        import deepspeed

        connect(backend, place.rank, place.size, device, timeout)
        if device.type == "cpu":
            # DeepSpeed would compile a shared-memory extension that only inference uses: it takes a minute, and a build
            # that is killed leaves a lock on which every later start hangs. There is none for GPUs. The dictionary is set, not
            # read: that would start compilers in every rank to see what could be compiled.
            deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
        deepspeed.init_distributed(dist_backend=backend, timeout=timeout)  # uses the existing process group


@contextlib.contextmanager
def quiet_deepspeed() -> Iterator[None]:
    """Hide DeepSpeed's info messages; warnings and errors still appear."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    yield
    from deepspeed.utils import logger  # importing deepspeed resets the level

    logger.setLevel(logging.WARNING)


def disconnect() -> None:
    """Destroy the process group and end its threads.

    A thread of gloo's that lets go of a tensor while the interpreter shuts down aborts the process: exit code 134 after all work is
    done, for which a job would count as failed.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
