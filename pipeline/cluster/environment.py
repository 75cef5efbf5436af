"""Read what the launcher or Slurm says about this process: rank, world size, cores, job; note their signals. Needs no PyTorch."""

import contextlib
import ipaddress
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.errors import UserError

LAUNCHER = "PERVIT_LAUNCHER_PID"  # set by launch/local.sh, whose death sends SIGTERM to its ranks
ALONE_SECONDS = 60  # grace period once the launcher is gone; launch/local.sh itself waits as long before it kills its ranks
SECRET = "PERVIT_JOB_SECRET"  # name of the variable with the job's secret, see rendezvous.py
START_WITH = "start with torchrun, or with the repository's launch/local.sh or sbatch"
_FILES_PER_RANK = 2  # connections of each rank to the job's store: the rendezvous' and the heartbeat's
_OTHER_FILES = 256  # that a process has open besides those that it counts: libraries, sockets, GPUs, logs
_OF_STEP = {"SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"}  # set by srun for each task


def is_first_process() -> bool:
    """Whether this process will be rank 0, before torch.distributed is imported."""
    rank = os.environ.get("SLURM_PROCID", "0") if "SLURM_STEP_ID" in os.environ else "0"
    return os.environ.get("RANK", rank) == "0"


def node_name() -> str:
    """The node's name as Slurm's ``--exclude`` takes it; outside of Slurm the host's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


@dataclass(frozen=True)
class Place:
    """A process's place in its job."""

    rank: int
    size: int  # ranks of the job
    local_rank: int
    local_size: int  # ranks on this node
    cpu_threads: int  # this rank's share of the node's cores


def read_place() -> Place:
    """Read this process's place in its job, and set the variables that PyTorch and DeepSpeed read, even for one process. Raises
    UserError: one that several processes need is missing or malformed."""
    rank, size = read_rank()
    if "RANK" not in os.environ:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=os.environ.get("SLURM_LOCALID", "0"))
    for name, alone in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        if not os.environ.get(name):
            if size > 1:
                raise UserError(f"{name} must be set for {size} processes to find each other", START_WITH)
            os.environ[name] = alone
    _integer("MASTER_PORT", 1 if size > 1 else 0, 65535)
    if "LOCAL_RANK" not in os.environ:
        _derive_local_rank(rank, size)
    if has_agent() and os.environ.get("LOCAL_WORLD_SIZE") == str(size):
        os.environ["MASTER_ADDR"] = "127.0.0.1"  # torchrun gives the host's name, for which ranks listen on the network
    return Place(rank, size, _integer("LOCAL_RANK", 0, size - 1), *share_of_node(size))


def read_rank() -> tuple[int, int]:
    """Read rank and number of ranks: RANK and WORLD_SIZE, else a Slurm step (``srun``), else a single process. Sets nothing. Raises
    UserError: one of them is missing or malformed."""
    names = ("RANK", "WORLD_SIZE")
    if "RANK" not in os.environ and os.environ.keys() >= _OF_STEP:
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    elif "RANK" not in os.environ and os.environ.get("WORLD_SIZE", "1") == "1":
        return 0, 1
    for name, other in (names, names[::-1]):
        if name not in os.environ:
            raise UserError(f"{other} {os.environ[other]} requires {name}, which is not set", START_WITH)
    size = _integer(names[1], 1)
    return _integer(names[0], 0, size - 1), size


def share_of_node(size: int) -> tuple[int, int]:
    """Ranks, of ``size``, on this node; and this rank's share of its cores. Sets nothing. Raises as :func:`read_rank`."""
    usable = len(os.sched_getaffinity(0))
    if "LOCAL_WORLD_SIZE" in os.environ:
        local_size = _integer("LOCAL_WORLD_SIZE", 1)
        return local_size, max(1, usable // local_size)
    # Slurm may have bound this task to its own cores already: dividing them once more would be wrong.
    local_size = _slurm_tasks_per_node() or size
    share = _integer("SLURM_CPUS_PER_TASK", 1) if os.environ.get("SLURM_CPUS_PER_TASK") else max(1, usable // local_size)
    return local_size, min(usable, share)


def _open_file_limits() -> tuple[int, int]:
    """The soft limit of open files, 1,024 on most systems, and the hard one; ``sys.maxsize`` where there is none."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (sys.maxsize if limit == resource.RLIM_INFINITY else limit for limit in limits)
    return soft, hard


def _allow_open_files(count: int) -> int:
    """Raise the soft limit of open files to ``count``, or as far as the hard one goes; returns it."""
    soft, hard = _open_file_limits()
    wanted = min(count, hard)
    if wanted <= soft:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, resource.RLIM_INFINITY if hard == sys.maxsize else hard))
    return wanted


def allow_more_files(count: int) -> int:
    """Raise the soft limit for ``count`` more open files as far as it goes; returns how many may be open beside everything else."""
    return _allow_open_files(_open_file_limits()[0] + count + _OTHER_FILES) - _OTHER_FILES


def allow_connections(rank: int, size: int) -> None:
    """Raise the limit of open files as far as a job of this size may need. Raises UserError: it is too low for rank 0, which
    hosts the store."""
    needed = _FILES_PER_RANK * size + _OTHER_FILES
    if rank == 0 and (hard := _open_file_limits()[1]) < needed:
        least = f"at least {needed} for the connections of {size} processes, got {hard}"
        remedy = "raise the limit on its node (LimitNOFILE of slurmd, /etc/security/limits.conf)"
        raise UserError(f"the limit of open files (ulimit -Hn) of rank 0 must be {least}", remedy)
    _allow_open_files(2 * needed)  # twice: gloo connects each process with each, and NCCL opens sockets too


def nodes_of(ranks: Sequence[int], size: int) -> list[str]:
    """The nodes on which Slurm starts some ranks, of ``size``, as ``--exclude`` takes them; none where that is not known."""
    hosts = list[str]()
    if "SLURM_JOB_NODELIST" in os.environ and not has_agent():  # torchrun's agents number nodes in an order of their own
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            hosts = subprocess.run(["scontrol", "show", "hostnames"], capture_output=True, text=True, timeout=20).stdout.split()
    each = share_of_node(size)[0]  # ranks are numbered node by node
    return list(dict.fromkeys(hosts[rank // each] for rank in ranks)) if len(hosts) * each == size else []


def _derive_local_rank(rank: int, size: int) -> None:
    """Set LOCAL_RANK, in a job whose ranks are numbered node by node, and LOCAL_WORLD_SIZE."""
    if os.environ.get("PET_NNODES") == str(size):  # a PyTorchJob of Kubernetes with one process in each pod
        os.environ.setdefault("LOCAL_WORLD_SIZE", "1")
    elif is_loopback(os.environ["MASTER_ADDR"]):
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(size))
    if "LOCAL_WORLD_SIZE" not in os.environ:
        problem = f"LOCAL_RANK must be set for {size} processes on several nodes, to 0, 1, ... on each node"
        raise UserError(problem, f"set it, or LOCAL_WORLD_SIZE to the processes per node, or {START_WITH}")
    os.environ["LOCAL_RANK"] = str(rank % _integer("LOCAL_WORLD_SIZE", 1, size))


def is_loopback(address: str) -> bool:
    """Whether the address as written is loopback: a node's own name may resolve to loopback on that node alone."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return address == "localhost"


def has_agent() -> bool:
    """Whether an agent of torchrun started this process. It ends the others as soon as one has failed, and starts them again."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def job_secret(text: str) -> bytes:
    """The job's secret, 32 bytes. The launcher or rank 0 draws it for each start; it appears in no log, file or message. Raises
    UserError: it is missing or malformed; the message does not quote it."""
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        found = f"{len(text)} other characters" if text else "nothing"
        problem = f"{SECRET} must be one number of 64 hexadecimal digits for all processes of a job, got {found}"
        raise UserError(problem, f"{START_WITH}, or set it to the output of openssl rand -hex 32 for all of them")
    return bytes.fromhex(text)


def job_name(environment: Mapping[str, str]) -> str | None:
    """The name under which ``scontrol`` knows this job alone: Slurm's number, ARRAY_TASK in a job array; None outside of a job."""
    if "SLURM_ARRAY_JOB_ID" in environment:
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment.get('SLURM_ARRAY_TASK_ID', '')}"
    return environment.get("SLURM_JOB_ID")


def slurm_granted_gpus() -> bool:
    """Whether this task was granted GPUs. SLURM_JOB_GPUS does not tell: under --exclusive it lists all GPUs of the node."""
    return bool(os.environ.get("SLURM_STEP_GPUS") and os.environ.get("CUDA_VISIBLE_DEVICES"))


def _slurm_tasks_per_node() -> int | None:
    """The largest count in SLURM_STEP_TASKS_PER_NODE, such as "8(x2)" or "3,2": no node then starts too many threads."""
    text = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    if not text:
        return None
    parts = [re.fullmatch(r"([1-9][0-9]{0,5})(\(x[0-9]+\))?", part) for part in text.split(",")]
    counts = [int(part[1]) for part in parts if part]
    if len(counts) < len(parts):
        wanted = f"must have counts such as '8(x2)' or '3,2', got {text!r}"
        raise UserError(f"the environment variable SLURM_STEP_TASKS_PER_NODE {wanted}", "start with srun, or unset it")
    return max(counts)


def _integer(name: str, low: int, high: int = 2**31) -> int:
    text = os.environ[name]
    if not re.fullmatch("[0-9]{1,10}", text) or not low <= int(text) <= high:
        problem = f"the environment variable {name} must be a whole number from {low} to {high}, got {text!r}"
        raise UserError(problem, START_WITH)
    return int(text)


class StopSignal:
    """Records SIGTERM and SIGUSR1, which a cluster sends before it ends a job, and SIGHUP of a closed terminal. The training
    loop checks it between steps.

    A context manager. On exit it restores the former handlers, or ignores these signals if one was received: clusters repeat
    them, and a second one must not change the exit code of a process that ends. An ignored SIGHUP (``nohup``) stays ignored.
    """

    def __init__(self) -> None:
        self.received = 0  # number of the signal

    def __enter__(self) -> "StopSignal":
        numbers = [signal.SIGTERM, signal.SIGUSR1]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self._former = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, signal.SIG_IGN if self.received else handler)

    def _note(self, number: int, _frame: object) -> None:
        self.received = number
        parent = str(os.getppid())
        if os.environ.get(LAUNCHER, parent) != parent:
            signal.alarm(ALONE_SECONDS)  # SIGALRM ends the process even inside a collective that hangs
