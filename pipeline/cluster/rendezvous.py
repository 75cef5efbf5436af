"""Join the other ranks: choose this process's device, meet at a key-value store (``meeting``), and prove to be of one job.

One process per GPU, or per share of the CPU cores where there is none. On one machine (MASTER_ADDR is a loopback address) nothing
listens on the network. On several nodes the network between them reaches the store, gloo and NCCL: ``docs/security.md``.
"""

import contextlib
import hashlib
import hmac
import logging
import os
import re
import secrets
import threading
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from pipeline.cluster.environment import allow_connections, is_loopback, nodes_of, read_place, slurm_granted_gpus
from pipeline.cluster.host import bind_near_gpu, choose_gloo_interface, gpu_is_usable, keep_freed_memory
from pipeline.cluster.meeting import meet, store_client
from pipeline.cluster.nccl import leave_faults_to_the_heartbeat
from pipeline.cluster.world import World, name_ranks
from pipeline.errors import NotConnected, UserError, first_line

DEFAULT_TIMEOUT = 1800.0  # seconds per collective where no run sets its own: torch.distributed's default for gloo
_LATE = 20.0  # seconds after which rank 0 names those that are missing
_ARRIVED = "arrived"  # key of the store to which each rank appends its number and kind of device
_ARRIVAL = re.compile(r"(?<!\S)([0-9]+):(cpu|cuda)(?!\S)")
_log = logging.getLogger(__name__)


def init_world(timeout: float = DEFAULT_TIMEOUT, run_folder: Path | None = None) -> World:
    """Find rank and world size, choose the device, initialize torch.distributed and DeepSpeed. Collective.

    ``timeout``: seconds that a collective may wait for a rank. A run passes ``distributed.collective_timeout``, so that the heartbeat
    names a rank that hangs before PyTorch ends those that wait for it. ``run_folder``: of a run with a heartbeat, which then ends it
    after a fault instead of NCCL's watchdog. Raises UserError: several processes, but a variable they need is missing or malformed;
    NotConnected: the ranks did not find each other.
    """
    place = read_place()
    cpu_threads = place.cpu_threads
    if gpu_is_usable():
        visible = torch.cuda.device_count()
        bound = visible == 1 and "SLURM_STEP_ID" in os.environ  # Slurm binds a GPU to each task
        if place.local_rank >= visible and not bound:
            problem = f"a node must have one GPU per process, got {visible} GPUs for {place.local_size} processes"
            raise UserError(problem, f"start {visible} processes per node")
        device = torch.device("cuda", 0 if bound else place.local_rank)
        cpu_threads = min(cpu_threads, len(bind_near_gpu(device.index, visible, place.local_size)))
        torch.cuda.set_device(device)
        os.environ["LOCAL_RANK"] = str(device.index)  # DeepSpeed takes it for the GPU's index
        # All batches of a run have one size: let cuDNN try its algorithms in the first step, unless that choice must not vary.
        torch.backends.cudnn.benchmark = not torch.are_deterministic_algorithms_enabled()
        torch.backends.cudnn.allow_tf32 = False  # Φp needs full fp32: TF32 gives errors of up to 5 %
    else:
        if place.rank == 0 and slurm_granted_gpus():
            hint = "running on the CPU (--gpus-per-node=0 asks for none)"
            _log.info(f"note: Slurm granted this task GPUs, but PyTorch finds none: {hint}")
        device = torch.device("cpu")
        torch.set_num_threads(cpu_threads)
        keep_freed_memory()
    if run_folder and place.size > 1:
        leave_faults_to_the_heartbeat(run_folder, timeout)
    world = World(place.rank, place.size, device, cpu_threads)
    _init_libraries(world, timedelta(seconds=timeout))
    return world


def _init_libraries(world: World, timeout: timedelta) -> None:
    # DeepSpeed 0.19 calls functions that PyTorch 2.13 deprecates; users cannot change that.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    os.environ.setdefault("DS_ACCELERATOR", world.device.type)
    with quiet_deepspeed():
        # Imported before there is a process group: what exists then becomes a default argument of its functions, which would
        # keep the group and its threads beyond `disconnect`.
        import deepspeed

        connect(world, timeout)
        if world.device.type == "cpu":
            # DeepSpeed would compile a shared-memory extension that only inference uses: it takes a minute, and a build
            # that is killed leaves a lock on which every later start hangs. There is none for GPUs. The dictionary is set, not
            # read: that would start compilers in every rank to see what could be compiled.
            deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
        deepspeed.init_distributed(dist_backend=dist.get_backend(), timeout=timeout)  # uses the existing process group


@contextlib.contextmanager
def quiet_deepspeed() -> Iterator[None]:
    """Hide DeepSpeed's info messages; warnings and errors still appear."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    yield
    from deepspeed.utils import logger  # importing deepspeed resets the level

    logger.setLevel(logging.WARNING)


def disconnect() -> None:
    """Destroy the process group and end its threads: one of gloo's that lets go of a tensor while the interpreter shuts down aborts the
    process, and with exit code 134, after all work is done, a job would count as failed."""
    if dist.is_initialized():
        dist.destroy_process_group()


def connect(world: World, timeout: timedelta) -> None:
    """Create the default process group, whose collectives all have this timeout. Collective. Raises UserError: a rank does not know the
    job's secret, which each has to prove; NotConnected: a rank could not be reached in that time."""
    backend, rank, size = "nccl" if world.device.type == "cuda" else "gloo", world.rank, world.size
    on_one_machine = size == 1 or is_loopback(os.environ["MASTER_ADDR"])
    if on_one_machine:
        for library in ("GLOO", "NCCL"):  # unless the user has chosen another interface
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    if size == 1:  # needs no port, and must not fail because another run on this machine took it
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    allow_connections(rank, size)
    store, secret = meet(rank, size, timeout, on_one_machine)
    # Eager initialization, as DeepSpeed does: NCCL connects now, not in the first step.
    binding = world.device if backend == "nccl" else None
    late = threading.Timer(_LATE, _name_the_late, (size,))
    try:
        store.append(_ARRIVED, f"{rank}:{world.device.type} ")  # type: ignore[attr-defined]  # missing in PyTorch's stubs
        if rank == 0:
            late.start()
        if not on_one_machine:
            choose_gloo_interface(store, rank, size)
        prefixed = dist.PrefixStore("default_pg", store)  # as PyTorch would name it
        dist.init_process_group(backend, store=prefixed, rank=rank, world_size=size, timeout=timeout, device_id=binding)
        prove_membership(secret, world)
    except RuntimeError as error:  # all that PyTorch raises; UserError is none
        raise _why(error, store, rank, size) from None
    finally:
        late.cancel()


def prove_membership(secret: bytes, world: World) -> None:
    """Challenge and response: each rank signs fresh random numbers of all ranks, which does not reveal the secret. Collective."""
    numbers = world.gather(secrets.token_hex(16))
    challenge = hashlib.sha256(str(numbers).encode()).hexdigest()  # the numbers themselves would be signed N times by N ranks
    for other, proof in enumerate(world.gather(_proof(secret, world.rank, challenge))):
        if not (isinstance(proof, str) and proof.isascii() and hmac.compare_digest(proof, _proof(secret, other, challenge))):
            docs = "see the repository's docs/security.md, a stranger can reach this port"
            problem = f"the process that came as rank {other} must know the secret of this job and does not"
            raise UserError(problem, f"start all processes with one launcher, and if you did, {docs}")


def _proof(secret: bytes, rank: int, challenge: str) -> str:
    """HMAC-SHA256 as 64 hexadecimal digits; no rank can repeat another one's."""
    return hmac.digest(secret, f"membership {rank} {challenge}".encode(), "sha256").hex()


def _name_the_late(size: int) -> None:
    """In a thread of rank 0: say for whom it waits. The connection of the main thread is locked meanwhile."""
    lacking, named, have_come = _lacking(store_client(_LATE), size)
    if lacking:
        look = "see nvidia-smi there" if have_come else "see why in their logs"
        _log.warning(f"rank 0 has waited {_LATE:.0f} s for {named}: {look}")


def _lacking(store: dist.Store, size: int) -> tuple[list[int], str, bool]:
    """Ranks that have not come, or where all have, those without a GPU where others have one; their names; whether they have come."""
    missing, without = list[int](), list[int]()
    with contextlib.suppress(RuntimeError):  # the store may be what was lost
        arrived = dict(_ARRIVAL.findall(store.get(_ARRIVED).decode(errors="replace")))
        missing = [rank for rank in range(size) if str(rank) not in arrived]
        without = sorted(int(rank) for rank, device in arrived.items() if device == "cpu" and "cuda" in arrived.values())
    nodes = nodes_of(lacking, size) if (lacking := missing or without) else []
    named = f"{name_ranks(lacking)} of {size} ranks" + (f" (on {', '.join(nodes)})" if nodes else "")
    return lacking, named if missing else f"{named}, which found no GPU, unlike others", not missing


def _why(error: RuntimeError, store: dist.Store, rank: int, size: int) -> NotConnected:
    """The error of a failed rendezvous; names the missing ranks if the store still answers."""
    lacking, named, have_come = _lacking(store, size)
    if lacking:
        unlike = "see nvidia-smi there, and whether a container has its GPUs"
        remedy = unlike if have_come else "see in their logs why they did not start"
        lost = NotConnected(f"rank {rank} timed out waiting for {named}", remedy)
        lost.missing = lacking
        return lost
    return NotConnected(
        f"rank {rank} cannot connect to the others ({first_line(error)}): see whether one has ended (its log), or set GLOO_SOCKET_IFNAME and "
        f"NCCL_SOCKET_IFNAME to the network interface between the nodes, such as eth0 (ip addr lists them)."
    )
