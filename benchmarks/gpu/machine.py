"""Stage ``machine``: the device, the versions, and what the device reaches: a matrix product and a copy."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch

from benchmarks.gpu.common import REPOSITORY, Context, Rows, milliseconds

_PACKAGES = ("torch", "triton", "deepspeed", "nvidia-dali-cuda130", "nvidia-dali-cuda120", "nvidia-nvjpeg", "nvidia-nccl-cu13")


def measure(context: Context) -> Rows:
    device = context.device
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        memory = f"{found.total_memory / 2**30:.0f} GiB, compute capability {found.major}.{found.minor}"
        yield (
            "GPUs",
            {"": f"{torch.cuda.device_count()} x {found.name}, {memory}, {found.multi_processor_count} multiprocessors"},
        )
        yield "driver", {"": _driver()}
    yield "CPU", {"": f"{_cpu()}, {len(os.sched_getaffinity(0))} CPUs for this process"}
    yield "Python, CUDA", {"": f"{platform.python_version()}, {torch.version.cuda or 'none'}"}
    yield "packages", {"": ", ".join(f"{name} {_version(name)}" for name in _PACKAGES)}
    yield "commit", {"": _commit()}
    side, dtype = (256, torch.float32) if context.miniature else (8192, torch.bfloat16)
    a, b = torch.randn(2, side, side, device=device, dtype=dtype)
    milliseconds(lambda: a @ b, device, 3)
    product = 2 * side**3 / milliseconds(lambda: a @ b, device, 10) / 1e9
    yield f"product of {side} x {side} matrices, {str(dtype).removeprefix('torch.')}", {"": f"{product:.3g} TFLOP/s"}
    copy = torch.empty_like(a)
    speed = 2 * a.nbytes / milliseconds(lambda: copy.copy_(a), device, 10) / 1e6
    yield "copy within the device, read and written", {"": f"{speed:.0f} GB/s"}
    if device.type == "cuda":
        pinned = torch.empty(64 << 20, dtype=torch.uint8).pin_memory()
        target = torch.empty_like(pinned, device=device)
        target.copy_(pinned)
        speed = pinned.nbytes / milliseconds(lambda: target.copy_(pinned, non_blocking=True), device, 10) / 1e6
        yield "copy from pinned memory", {"": f"{speed:.1f} GB/s"}


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.split("\n")[0] or "not known"
    except (OSError, subprocess.TimeoutExpired):
        return "not known, nvidia-smi does not answer"


def _cpu() -> str:
    lines = [line for line in open("/proc/cpuinfo") if line.startswith("model name")]
    return lines[0].partition(":")[2].strip() if lines else platform.machine()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not there"


def _commit() -> str:
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "not known"
    except OSError:
        return "not known"
