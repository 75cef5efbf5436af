"""Stages ``machine`` and ``exchange``: devices and versions, and what the devices reach: a product, a copy, an all-reduce."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from functools import partial
from importlib.metadata import distributions

import torch
import torch.distributed as dist

from benchmarks.gpu.common import REPOSITORY, Context, Rows, Values, milliseconds

_PACKAGES = r"torch|triton|deepspeed|nvidia-(dali|nvimgcodec|nvjpeg|nccl|cudnn).*"
_VERSION = re.findall(r'^version = "(.+)"$', (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)[0]
_MESSAGES = (4 << 20, 64 << 20, 256 << 20)  # bytes; M's gradients in fp32 are 175 MB


def measure(context: Context) -> Rows:
    yield from exchange(context) if context.stage == "exchange" else machine(context)


def machine(context: Context) -> Rows:
    if not (context.miniature or torch.cuda.is_available()):
        yield {"failed": f"PyTorch {torch.__version__} finds no CUDA GPU"}
        return
    device = context.device
    yield head(context)
    side, dtype = (256, torch.float32) if context.miniature else (8192, torch.bfloat16)
    a, b = torch.randn(2, side, side, device=device, dtype=dtype)
    milliseconds(lambda: a @ b, device, 3)
    product = 2 * side**3 / milliseconds(lambda: a @ b, device, 10) / 1e9
    yield {"case": f"product of {side} x {side} matrices, {str(dtype).removeprefix('torch.')}", "tflops": product}
    copy = torch.empty_like(a)
    speed = 2 * a.nbytes / milliseconds(lambda: copy.copy_(a), device, 10) / 1e6
    yield {"case": "copy within the device, read and written", "gb_per_s": speed}
    if device.type == "cuda":
        pinned = torch.empty(64 << 20, dtype=torch.uint8).pin_memory()
        target = torch.empty_like(pinned, device=device)
        target.copy_(pinned)
        speed = pinned.nbytes / milliseconds(lambda: target.copy_(pinned, non_blocking=True), device, 10) / 1e6
        yield {"case": "copy from pinned memory", "gb_per_s": speed}


def head(context: Context) -> Values:
    """What the record says of the machine before its rows."""
    gpu: Values = {"name": "none, in miniature", "count": 0, "capability": "", "driver": "", "memory_gib": 0.0}
    if context.device.type == "cuda":
        found = torch.cuda.get_device_properties(context.device)
        gpu = {"name": found.name, "count": torch.cuda.device_count(), "capability": f"{found.major}.{found.minor}"}
        gpu |= {"driver": _driver(), "memory_gib": round(found.total_memory / 2**30, 1)}
    versions = {each.name: each.version for each in distributions() if each.name and re.fullmatch(_PACKAGES, each.name)}
    dali = next((number for name, number in versions.items() if name.startswith("nvidia-dali")), None)
    software = {"torch": torch.__version__, "cuda": torch.version.cuda, "dali": dali, "pervit": _VERSION}
    software |= {"python": platform.python_version(), "packages": versions, "cpu": _cpu(), "cpus": len(os.sched_getaffinity(0))}
    about = f"{gpu['count']} x {gpu['name']}, driver {gpu['driver']}, PyTorch {torch.__version__}, DALI {dali}"
    return {"is": about, "gpu": gpu, "software": software}


def exchange(context: Context) -> Rows:
    """All-reduce over all GPUs: each sends and receives 2 (n - 1) / n of the message, which is what the bandwidth counts."""
    from pipeline.cluster.rendezvous import disconnect, init_world

    world = init_world()
    for size in _MESSAGES[: 1 if context.miniature else None]:
        message = torch.zeros(size // 4, device=world.device)  # fp32
        repeats = 1 if context.miniature else 10
        call = partial(dist.all_reduce, message)
        call()
        ms = milliseconds(call, world.device, repeats)
        speed = 2 * (world.size - 1) / world.size * size / ms / 1e6
        yield {"case": f"all-reduce of {size >> 20} MiB", "ms": ms, "gb_per_s": speed}
    disconnect()


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.split("\n")[0] or "not known"
    except (OSError, subprocess.TimeoutExpired):
        return "not known, nvidia-smi does not answer"


def _cpu() -> str:
    lines = [line for line in open("/proc/cpuinfo") if line.startswith("model name")]
    return lines[0].partition(":")[2].strip() if lines else platform.machine()
