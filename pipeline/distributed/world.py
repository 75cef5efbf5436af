"""Rank, world size and device of this process. One process per GPU, or per share of the CPU cores where there is none."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from pipeline.distributed.affinity import bind_near_gpu
from pipeline.distributed.allocator import keep_freed_memory
from pipeline.distributed.driver import gpu_is_usable
from pipeline.distributed.exchange import broadcast_json, gather_json
from pipeline.distributed.nccl import leave_faults_to_the_heartbeat
from pipeline.distributed.rendezvous import connect
from pipeline.errors import UserError

DEFAULT_TIMEOUT = 1800.0  # seconds per collective where no run sets its own: torch.distributed's default for gloo
_log = logging.getLogger(__name__)
_FROM_SRUN = {  # set by srun for each task -> read by PyTorch and DeepSpeed
    "SLURM_PROCID": "RANK",
    "SLURM_STEP_NUM_TASKS": "WORLD_SIZE",
    "SLURM_LOCALID": "LOCAL_RANK",
}


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

    def from_main(self, value: object) -> Any:
        """Plain data of rank 0, on every rank, see :func:`pipeline.distributed.exchange.broadcast_json`. Collective."""
        return broadcast_json(value, self.rank, self.device)

    def gather(self, value: object) -> list:
        """All-gather plain data in rank order, see :func:`pipeline.distributed.exchange.gather_json`. Collective."""
        return gather_json(value, self.size, self.device)


def init_world(timeout: float = DEFAULT_TIMEOUT, run_folder: Path | None = None) -> World:
    """Find rank and world size, choose the device, initialize torch.distributed and DeepSpeed. Collective.

    Sources, in this order: RANK and WORLD_SIZE (``launch/local.sh``), a Slurm step (``srun``), else a single process.

    Args:
        timeout: seconds that a collective may wait for a rank. A run passes ``distributed.collective_timeout``, so that the
            heartbeat names a rank that hangs before PyTorch ends those that wait for it.
        run_folder: of a run with a heartbeat, which then ends it after a fault in place of NCCL's watchdog.

    Raises:
        UserError: several processes, but a variable they need is missing or malformed.
        NotConnected: the ranks did not find each other.
    """
    _read_environment()
    world_size = _integer("WORLD_SIZE", 1)
    rank, local_rank = _integer("RANK", 0, world_size - 1), _integer("LOCAL_RANK", 0, world_size - 1)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            if world_size > 1:
                raise UserError(
                    f"{name} is not set, but {world_size} processes need it to find each other",
                    "start with the repository's launch/local.sh or sbatch",
                )
            os.environ[name] = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}[name]
    _integer("MASTER_PORT", 0, 65535)
    usable = len(os.sched_getaffinity(0))
    if "LOCAL_WORLD_SIZE" in os.environ:
        local_size = _integer("LOCAL_WORLD_SIZE", 1, world_size)
        cpu_threads = max(1, usable // local_size)
    else:
        # Slurm may have bound this task to its own cores already: dividing them once more would be wrong.
        local_size = _slurm_tasks_per_node() or world_size
        share = _integer("SLURM_CPUS_PER_TASK", 1) if os.environ.get("SLURM_CPUS_PER_TASK") else max(1, usable // local_size)
        cpu_threads = min(usable, share)
    if gpu_is_usable():
        device = torch.device("cuda", _gpu_index(local_rank, local_size))
        cpu_threads = min(cpu_threads, len(bind_near_gpu(device.index, torch.cuda.device_count(), local_size)))
        torch.cuda.set_device(device)
        os.environ["LOCAL_RANK"] = str(device.index)  # DeepSpeed takes it for the GPU's index
        # All batches of a run have one size: let cuDNN try its algorithms in the first step, unless that choice must not vary.
        torch.backends.cudnn.benchmark = not torch.are_deterministic_algorithms_enabled()
        torch.backends.cudnn.allow_tf32 = False  # Φp needs full fp32: TF32 gives errors of up to 5 %
    else:
        if rank == 0 and _slurm_granted_gpus():
            _log.info(
                "note: Slurm granted this task GPUs, but PyTorch finds none: running on the CPU (--gpus-per-node=0 asks for none)"
            )
        device = torch.device("cpu")
        torch.set_num_threads(cpu_threads)
        keep_freed_memory()
    if run_folder and world_size > 1:
        leave_faults_to_the_heartbeat(run_folder, timeout)
    _connect("nccl" if device.type == "cuda" else "gloo", rank, world_size, device, timedelta(seconds=timeout))
    return World(rank, world_size, device, cpu_threads)


def _gpu_index(local_rank: int, local_size: int) -> int:
    """Index of this rank's GPU among the visible ones: all of the node's, or one where Slurm binds a GPU to each task."""
    visible = torch.cuda.device_count()
    if visible == 1 and "SLURM_STEP_ID" in os.environ:
        return 0
    if local_rank >= visible:
        raise UserError(
            f"this node runs {local_size} processes but has {visible} GPUs, one per process needed",
            f"start {visible} processes per node",
        )
    return local_rank


def _slurm_granted_gpus() -> bool:
    """Whether this task was granted GPUs. SLURM_JOB_GPUS does not tell: under --exclusive it lists all GPUs of the node."""
    return bool(os.environ.get("SLURM_STEP_GPUS") and os.environ.get("CUDA_VISIBLE_DEVICES"))


def _integer(name: str, low: int, high: int = 2**31) -> int:
    text = os.environ[name]
    if not re.fullmatch("[0-9]{1,10}", text) or not low <= int(text) <= high:
        raise UserError(
            f"the environment variable {name} is {text!r}, a whole number from {low} to {high} needed",
            "start with the repository's launch/local.sh or sbatch",
        )
    return int(text)


def _read_environment() -> None:
    """Set RANK, WORLD_SIZE and LOCAL_RANK, which DeepSpeed requires even for one process."""
    if "RANK" in os.environ:
        missing = [name for name in _FROM_SRUN.values() if name not in os.environ]
        if missing:
            raise UserError(
                f"RANK is set but {missing[0]} is not, all of RANK, WORLD_SIZE and LOCAL_RANK needed",
                "start with the repository's launch/local.sh or sbatch",
            )
    elif "SLURM_STEP_ID" in os.environ and all(name in os.environ for name in _FROM_SRUN):
        for slurm_name, name in _FROM_SRUN.items():
            os.environ[name] = str(_integer(slurm_name, 0))
    elif os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} but RANK is not set, both needed",
            "start with the repository's launch/local.sh or sbatch",
        )
    else:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")


def _slurm_tasks_per_node() -> int | None:
    """The largest count in SLURM_STEP_TASKS_PER_NODE, such as "8(x2)" or "3,2": no node then starts too many threads."""
    text = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    if not text:
        return None
    parts = [re.fullmatch(r"([1-9][0-9]{0,5})(\(x[0-9]+\))?", part) for part in text.split(",")]
    counts = [int(part[1]) for part in parts if part]
    if len(counts) < len(parts):
        raise UserError(
            f"the environment variable SLURM_STEP_TASKS_PER_NODE is {text!r}, counts such as '8(x2)' or '3,2' needed",
            "start with srun, or unset it",
        )
    return max(counts)


def _connect(backend: str, rank: int, size: int, device: torch.device, timeout: timedelta) -> None:
    # DeepSpeed 0.19 calls functions that PyTorch 2.13 deprecates; users cannot change that.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    with quiet_deepspeed():
        # Imported before there is a process group: what exists then becomes a default argument of its functions, which would
        # keep the group and its threads beyond `disconnect`.
        deepspeed = import_deepspeed()
        connect(backend, rank, size, device, timeout)
        if device.type == "cpu":
            # DeepSpeed would compile a shared-memory extension that only inference uses: it takes a minute, and a build
            # that is killed leaves a lock on which every later start hangs. There is none for GPUs. The dictionary is set, not
            # read: that would start compilers in every rank to see what could be compiled.
            deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
        deepspeed.init_distributed(dist_backend=backend, timeout=timeout)  # uses the existing process group


def import_deepspeed() -> ModuleType:
    """DeepSpeed, without MLflow: its autotuner, which is not used, would bring that into every training where it is installed, with
    pandas and a thread of pyarrow's."""
    hidden = "mlflow" not in sys.modules
    if hidden:
        sys.modules["mlflow"] = None  # type: ignore[assignment]  # Python's way to say that there is none
    try:
        import deepspeed
    finally:
        if hidden:
            del sys.modules["mlflow"]
    return deepspeed


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
