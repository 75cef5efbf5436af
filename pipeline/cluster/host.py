"""Prepare this machine for a rank: check the GPU's driver, bind to cores, set up the C allocator, choose gloo's interface.

Slurm's own binding of GPUs (``--gpu-bind=closest`` or ``single``) hides a rank's GPU from its neighbours, and NCCL then copies
through host memory where it could copy from GPU to GPU. So the job scripts leave all GPUs and all cores of the job visible to
every rank (``--gpu-bind=none --cpu-bind=none``), and each rank takes its cores here.
"""

import contextlib
import ctypes
import os
import re
import socket
import warnings
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from pipeline.cluster.environment import is_loopback
from pipeline.errors import UserError

_DALI_BUILDS = {"nvidia-dali-cuda130": 13, "nvidia-dali-cuda120": 12}  # package -> the CUDA that it was built for
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_ADDRESS = "address"  # key of the store, and the rank
_ANY_PORT = 9  # no packet is sent
_TRIES = 3  # of TCP to send something again, each twice as long after the one before: for 1.4 s nobody has answered
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # parameters of mallopt(3)
_READS = {"x86_64": ("0", "17"), "aarch64": ("63", "67")}.get(os.uname().machine, ())  # numbers of read and pread64
# Files of a cgroup of version 2 and of version 1: its limit in bytes, and what is used of it.
_LIMITS = {"": ("memory.max", "memory.current"), "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes")}
_PROC, _SYS = Path("/proc/driver/nvidia/gpus"), Path("/sys")


def this_node() -> str:
    """The same for all processes that share this machine and number each other, so not in containers with numbers of their own. Hosts
    of two machines may have one name."""
    with contextlib.suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return f"process {os.getpid()} of {socket.gethostname()}"  # shared with nobody, for all that is known


def bind_near_gpu(index: int, visible: int, local_size: int, proc: Path = _PROC, sys: Path = _SYS) -> list[int]:
    """Restrict this process, and the threads that it will start, to its share of the cores beside its GPU; returns its CPUs.

    Nothing changes where one rank has the node to itself, where Slurm has bound the ranks already, each rank sees its own GPU
    alone, or the kernel does not say where the GPUs are. The ``local_size`` ranks of this node have the first of the ``visible`` GPUs,
    this one has GPU ``index``. ``proc``, ``sys``: where the NVIDIA driver and Linux describe the hardware.
    """
    allowed = os.sched_getaffinity(0)
    per_task = os.environ.get("SLURM_CPUS_PER_TASK", "")
    bound_by_slurm = per_task.isdecimal() and len(allowed) <= int(per_task)
    if 1 < local_size <= visible and not bound_by_slurm:
        places = gpu_places(proc)
        identities = [str(torch.cuda.get_device_properties(device).uuid) for device in range(local_size)]
        share = share_of(index, [near(places.get(identity), sys) & allowed for identity in identities], sys)
        if share:
            os.sched_setaffinity(0, share)
    return sorted(os.sched_getaffinity(0))


def gpu_places(proc: Path = _PROC) -> dict[str, str]:
    """PCI address of each GPU by its UUID, written as PyTorch writes it, without "GPU-"."""
    places = {}
    for path in proc.glob("*/information"):
        text = path.read_text(errors="replace")
        uuid, address = re.search(r"GPU UUID:\s*GPU-(\S+)", text), re.search(r"Bus Location:\s*(\S+)", text)
        if uuid and address:
            places[uuid[1].lower()] = address[1].lower()
    return places


def near(address: str | None, sys: Path = _SYS) -> set[int]:
    """CPUs of the NUMA node that a PCI device is attached to; empty if that is not known."""
    return _cpus_in(sys / "bus/pci/devices" / str(address) / "local_cpulist")


def share_of(index: int, near_each: Sequence[set[int]], sys: Path = _SYS) -> set[int]:
    """A rank's part of the CPUs beside its GPU, divided core by core with the ranks whose GPUs are beside the same ones.

    ``near_each`` has the CPUs beside the GPU of every rank on this node. Empty if there is less than one core for each.
    """
    own = near_each[index]
    siblings = {cpu: _cpus_in(sys / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") | {cpu} for cpu in own}
    cores = sorted({frozenset(threads & own) for threads in siblings.values()}, key=min)
    neighbours = [other for other, cpus in enumerate(near_each) if cpus == own]
    place, count = neighbours.index(index), len(neighbours)
    first, last = (len(cores) * edge // count for edge in (place, place + 1))
    return set().union(*cores[first:last])


def _cpus_in(file: Path) -> set[int]:
    """The CPUs that a file lists as Linux does, "0-3,8,12-13"; none if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        ranges = [part.partition("-") for part in file.read_text().strip().split(",") if part]
        return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}
    return set()


def gpu_is_usable() -> bool:
    """Whether PyTorch finds a GPU. One that it or DALI cannot use, and that the user has not hidden, is an error of the installation."""
    with warnings.catch_warnings(record=True) as caught:  # PyTorch warns of what follows in its own words
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if usable:
        check_dali(cuda_of_driver())
    elif os.path.exists("/dev/nvidiactl") and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        warned = [str(warning.message).partition("CUDA initialization: ")[2] for warning in caught]
        raise no_gpu_found(cuda_of_driver(), torch.version.cuda, next(filter(None, warned), ""))
    return usable


def no_gpu_found(supported: int, cuda: str | None, warning: str = "") -> UserError:
    """The error for a machine with an NVIDIA driver on which PyTorch, built for ``cuda`` ("13.0"; None: the CPU), finds no GPU."""
    name = f"PyTorch {torch.__version__}"
    if not cuda:
        return _no_gpu(f"{name} is the CPU build", "install the CUDA build with `make install HAS_GPU=1` in the repository")
    if supported and supported // 1000 < int(cuda.partition(".")[0]):
        return _too_old(name, cuda, supported)
    reason = re.split(r"\.\s|, e\.g\.|\n", warning)[0]
    remedy = "check whether nvidia-smi lists one and what CUDA_VISIBLE_DEVICES is set to"
    return _no_gpu(f"{name} for CUDA {cuda} finds no GPU{f' ({reason})' if reason else ''}", remedy)


def check_dali(supported: int) -> None:
    """Refuse a build of DALI that the driver is too old for, although PyTorch's build works."""
    builds = [cuda for package, cuda in _DALI_BUILDS.items() if _is_installed(package)]
    if builds and supported and max(builds) > supported // 1000:
        raise _too_old("the installed DALI", str(max(builds)), supported)


def _too_old(package: str, cuda: str, supported: int) -> UserError:
    remedy = "install a newer driver"
    if 12 <= supported // 1000:
        remedy = f"run `make install CUDA=12` in the repository for packages that this driver supports, {remedy}"
    version = f"{supported // 1000}.{supported % 1000 // 10}"
    return _no_gpu(f"{package} is built for CUDA {cuda} and the driver supports CUDA {version}", remedy)


def _no_gpu(problem: str, remedy: str) -> UserError:
    problem = f"the NVIDIA GPU of this machine cannot be used: {problem}"
    return UserError(problem, f"{remedy}, or set CUDA_VISIBLE_DEVICES= (empty) to use the CPU")


def cuda_of_driver() -> int:
    """The newest CUDA version that the driver supports, as 1000 * major + 10 * minor; a compatibility package (cuda-compat)
    counts. 0 if the driver does not tell."""
    found = ctypes.c_int(0)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(found))
    return found.value


def _is_installed(package: str) -> bool:
    with contextlib.suppress(PackageNotFoundError):
        return bool(version(package))
    return False


def memory() -> tuple[int, int]:
    """The memory that this process and its neighbours may use, and what is free of it or caches files, in bytes: the machine's, or that
    of the tightest cgroup."""
    total, free = psutil.virtual_memory()[:2]
    cgroups = Path("/proc/self/cgroup")
    for _, kind, own in (line.split(":", 2) for line in (cgroups.read_text().splitlines() if cgroups.exists() else ())):
        group = Path("/sys/fs/cgroup", kind, own[1:])
        for folder in (group, *group.parents) if kind in _LIMITS else ():
            with contextlib.suppress(OSError, ValueError, KeyError):  # it has no limit, or a container hides it
                limit, used = (int((folder / name).read_text()) for name in _LIMITS[kind])
                stat = dict(row.split() for row in (folder / "memory.stat").read_text().splitlines())
                pages = sum(int(stat.get(f"total_{name}", stat[name])) for name in ("active_file", "inactive_file"))
                total, free = min(total, limit), min(free, limit - used + pages)
    return total, free


def keep_freed_memory() -> bool:
    """Tell glibc's allocator to keep the memory that a training step frees for the next one; PyTorch takes CPU tensors from malloc.

    glibc asks the kernel for each block above 32 MiB and gives it back when it is freed, as it does with the end of the heap; the
    next step gets new pages, zeroed one by one: 5 to 8 % of the CPU time of a step of PerViT-T with 16 images. Settings of the
    user's own (``MALLOC_...`` or ``GLIBC_TUNABLES``), other C libraries and allocators are left alone; the result tells.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        # Take no blocks from mmap, and never give the end of the heap back.
        return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, -1))
    return False


def choose_gloo_interface(store: dist.Store, rank: int, size: int) -> None:
    """Set GLOO_SOCKET_IFNAME to the interface towards the other ranks, unless it is set or the host's name resolves as it should.

    gloo listens at the address that the host's own name resolves to. Debian's installer makes that loopback (127.0.1.1), where
    ranks on other nodes cannot reach it. NCCL looks for an interface by itself and leaves loopback out.

    Every rank tells its own address in the store. Ranks on rank 0's node, for which MASTER_ADDR may be loopback too, take the
    interface towards the last rank; a ``RuntimeError`` if that does not come.
    """
    own = own_address(os.environ["MASTER_ADDR"])
    store.set(f"{_ADDRESS}/{rank}", own)
    if os.environ.get(_GLOO_INTERFACE) or not name_is_loopback():
        return
    if not own or is_loopback(own):
        own = own_address(store.get(f"{_ADDRESS}/{size - 1}").decode(errors="replace"))
    if not own or is_loopback(own):  # still: all ranks are on this machine
        return
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == own for entry in entries):
            os.environ[_GLOO_INTERFACE] = name
            return


def name_is_loopback() -> bool:
    """Whether this host's own name resolves to loopback, or not at all, when gloo takes loopback as well."""
    with contextlib.suppress(OSError):
        return is_loopback(str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0]))
    return True


def own_address(peer: str) -> str:
    """This host's address on the way to another one; empty if there is no way."""
    with contextlib.suppress(OSError, UnicodeError):
        family, kind, protocol, _, place = socket.getaddrinfo(peer, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)
            return probe.getsockname()[0]
    return ""


def cause_on(host: str, address: str) -> str:
    """What to look for where a process fell silent: whether its node answers, if only to refuse a connection, tells node from process."""
    if not address:
        return "find the cause on its node (its log, dmesg, the network)"
    try:
        socket.create_connection((address, _ANY_PORT), timeout=2).close()
    except OSError as error:
        if not isinstance(error, ConnectionRefusedError):
            return f"its node ({address}) does not answer either, {host} is down or the network to it is cut"
    return f"its node answers, so the process was killed (for lack of memory?) or stopped: see its log and dmesg on {host}"


def hanging_read(before: set[tuple[str, str]]) -> tuple[str, set[tuple[str, str]]]:
    """The file of which a thread of this process, in whatever library, has waited for a read since ``before``, empty if none; and
    the next ``before``. Linux tells the call that a thread is in, and how often it has slept; memory maps make no calls."""
    now = set()
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # it has ended, or the kernel does not tell
            now.add(((task / "syscall").read_text(), (task / "status").read_text().partition("voluntary")[2]))
    for number, *arguments in (call.split() for call, _ in sorted(now & before)):
        with contextlib.suppress(OSError):  # closed meanwhile
            if number in _READS and (path := os.readlink(f"/proc/self/fd/{int(arguments[0], 16)}")).startswith("/"):
                return path, now  # "socket:..." and "pipe:..." are none
    return "", now


def unanswered() -> str:
    """The address to which a TCP connection of this process, in whatever library, sends in vain; empty if all are answered. A process
    that does not read, but whose node lives, answers."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, or no TCP
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    # The third byte of struct tcp_info in tcp(7).
                    if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 3)[2] >= _TRIES:
                        return str(connection.getpeername()[0]).removeprefix("::ffff:")
    return ""
