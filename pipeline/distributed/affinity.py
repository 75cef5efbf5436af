"""Bind a rank to the CPU cores beside its GPU.

Slurm's own binding of GPUs (``--gpu-bind=closest`` or ``single``) hides a rank's GPU from its neighbours, and NCCL then copies
through host memory where it could copy from GPU to GPU. So the job scripts leave all GPUs and all cores of the job visible to
every rank (``--gpu-bind=none --cpu-bind=none``), and each rank takes its cores here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch

_PROC, _SYS = Path("/proc/driver/nvidia/gpus"), Path("/sys")


def bind_near_gpu(index: int, visible: int, local_size: int, proc: Path = _PROC, sys: Path = _SYS) -> list[int]:
    """Restrict this process, and the threads that it will start, to its share of the cores beside its GPU.

    Nothing changes where one rank has the node to itself, where Slurm has bound the ranks already, each rank sees its own GPU
    alone, or the kernel does not say where the GPUs are.

    Args:
        index: of this rank's GPU among the visible ones.
        visible: number of visible GPUs.
        local_size: ranks on this node; they have the GPUs 0 to ``local_size - 1``.
        proc, sys: where the NVIDIA driver and Linux describe the hardware.

    Returns:
        The CPUs that this process may use now.
    """
    allowed = os.sched_getaffinity(0)
    per_task = os.environ.get("SLURM_CPUS_PER_TASK", "")
    bound_by_slurm = per_task.isdecimal() and len(allowed) <= int(per_task)
    if 1 < local_size <= visible and not bound_by_slurm:
        places = gpu_places(proc)
        identities = [str(torch.cuda.get_device_properties(each).uuid) for each in range(local_size)]
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
    try:
        return cpu_list((sys / "bus/pci/devices" / str(address) / "local_cpulist").read_text())
    except (OSError, ValueError):
        return set()


def share_of(index: int, near_each: Sequence[set[int]], sys: Path = _SYS) -> set[int]:
    """A rank's part of the CPUs beside its GPU, divided core by core with the ranks whose GPUs are beside the same ones.

    Args:
        index: of the rank.
        near_each: the CPUs beside the GPU of every rank on this node.
        sys: for the CPUs that are hyper-threads of one core.

    Returns:
        Empty if there is less than one core for each.
    """
    own = near_each[index]
    cores = sorted({frozenset(siblings(cpu, sys) & own) for cpu in own}, key=min)
    neighbours = [other for other, cpus in enumerate(near_each) if cpus == own]
    place, count = neighbours.index(index), len(neighbours)
    first, last = (len(cores) * edge // count for edge in (place, place + 1))
    return set().union(*cores[first:last])


def siblings(cpu: int, sys: Path = _SYS) -> set[int]:
    """The hyper-threads of the core that a CPU belongs to, itself included."""
    try:
        return cpu_list((sys / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()) | {cpu}
    except (OSError, ValueError):
        return {cpu}


def cpu_list(text: str) -> set[int]:
    """Linux's notation: "0-3,8,12-13"."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}
