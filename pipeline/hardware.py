"""Know the hardware: kinds of GPU by their data sheets; bf16 support, peak FLOP/s and memory of this process's device."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import UserError

if TYPE_CHECKING:
    import torch

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU."""

    name: str
    driver: str  # what its name for the driver contains
    memory: int  # bytes that a process can allocate: the device's total less what the driver keeps
    # Per second, dense matrix products with fp32 accumulation, 2 per multiply-accumulate; None: no bf16.
    bf16_flops: float | None
    fp32_flops: float  # per second, outside of tensor cores or with TF32 off
    bandwidth: float  # of its memory, bytes per second
    link: float  # to the other GPUs of its node, bytes per second in each direction
    source: str

    @property
    def chip(self) -> str:
        """The name without the size of the memory."""
        return self.name.rpartition("-")[0]


# Of kinds whose names for the driver contain each other, the longer name comes first.
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("v100-32g", "V100", int(31.7 * GIB), None, 15.7e12, 0.90e12, 150e9, "NVIDIA V100 data sheet, SXM2"),
        Gpu("a30-24g", "A30", int(23.5 * GIB), 165e12, 10.3e12, 0.933e12, 32e9, "NVIDIA A30 data sheet, PCIe 4"),
        Gpu("a40-48g", "A40", int(44.4 * GIB), 149.7e12, 37.4e12, 0.696e12, 32e9, "NVIDIA A40 data sheet, PCIe 4"),
        Gpu("a100-40g", "A100", int(39.4 * GIB), 312e12, 19.5e12, 1.555e12, 300e9, "NVIDIA A100 data sheet, SXM"),
        Gpu("a100-80g", "A100", int(79.2 * GIB), 312e12, 19.5e12, 2.039e12, 300e9, "NVIDIA A100 data sheet, SXM"),
        Gpu("h100pcie-80g", "H100 PCIe", int(79.1 * GIB), 756e12, 51e12, 2.0e12, 64e9, "NVIDIA H100 data sheet, PCIe 5"),
        Gpu("h100nvl-94g", "H100 NVL", int(93.1 * GIB), 835e12, 60e12, 3.9e12, 64e9, "NVIDIA H100 data sheet, NVL on PCIe 5"),
        Gpu("h100-80g", "H100", int(79.1 * GIB), 989e12, 67e12, 3.35e12, 450e9, "NVIDIA H100 data sheet, SXM"),
        Gpu("h200-141g", "H200", int(139.8 * GIB), 989e12, 67e12, 4.8e12, 450e9, "NVIDIA H200 data sheet, SXM"),
        Gpu("b200-180g", "B200", int(178 * GIB), 2250e12, 75e12, 8.0e12, 900e9, "NVIDIA HGX B200 data sheet"),
        Gpu("l40s-48g", "L40S", int(44.5 * GIB), 362e12, 91.6e12, 0.864e12, 32e9, "NVIDIA L40S data sheet, PCIe 4"),
        Gpu("rtx3090-24g", "RTX 3090", int(23.5 * GIB), 71e12, 35.6e12, 0.936e12, 32e9, "NVIDIA Ampere GA102 architecture, PCIe 4"),
        Gpu("rtx4090-24g", "RTX 4090", int(23.5 * GIB), 165.2e12, 82.6e12, 1.008e12, 32e9, "NVIDIA Ada GPU architecture, PCIe 4"),
    )
}  # fmt: skip
DEFAULT_GPU = "h100-80g"
NETWORK = 25e9  # bytes per second between a node and the others: one port of 200 Gbit/s


def gpu_named(name: str) -> Gpu:
    """Look up a kind of GPU. Raises UserError: an unknown name."""
    if name not in GPUS:
        raise UserError(f"--gpu must be one of {', '.join(GPUS)}, got {name!r}", "choose the one closest in memory")
    return GPUS[name]


def gpu_of_driver(device: str) -> Gpu | None:
    """Find a kind of GPU by what the driver calls a device; None if it is not in the table, or only a part of a GPU."""
    if "MIG" in device or "Laptop" in device:
        return None
    return next((gpu for gpu in GPUS.values() if re.search(rf"\b{gpu.driver}\b", device)), None)


def native_bf16(device: torch.device) -> tuple[bool, str]:
    """Tell whether a device has bf16 instructions, without which bf16 is emulated and slow; and why, as half a sentence."""
    import torch

    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        name = f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}"
        return (major >= 8, name if major >= 8 else f"{name}, and bf16 requires 8.0")
    # Instruction sets for bf16 matrix products on x86 CPUs, as PyTorch reports them.
    instructions = {"AVX512-BF16": torch.cpu._is_avx512_bf16_supported, "AMX": torch.cpu._is_amx_tile_supported}
    found = [name for name, supported in instructions.items() if supported()]
    if not found:
        return False, "this CPU has no bf16 instructions (AVX512-BF16 or AMX)"
    # PyTorch multiplies with oneDNN, which obeys ONEDNN_MAX_CPU_ISA.
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False, f"this CPU has {found[0]}, but ONEDNN_MAX_CPU_ISA={os.environ.get('ONEDNN_MAX_CPU_ISA')} does without"
    return True, f"this CPU has {found[0]}"


def cpu_name() -> str:
    """This machine's kind of CPU, and the instructions that PyTorch uses: "AMD EPYC 9654 96-Core Processor, AVX512"."""
    import torch

    name = re.search(r"^model name\s*: (.+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"{name[1] if name else platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def peak_flops(device: torch.device, precision: str) -> tuple[float, str]:
    """Peak FLOP/s of one rank's device, and the source of the figure ("data sheet" or "measured"). Emulated bf16 is measured against
    the fp32 peak, since it runs on fp32 instructions: the utilization stays below 100 %."""
    import torch

    if device.type == "cuda" and precision == "bf16":
        gpu = gpu_of_driver(torch.cuda.get_device_name(device))
        if gpu and gpu.bf16_flops:
            return gpu.bf16_flops, "data sheet"
    native = precision == "bf16" and native_bf16(device)[0]
    return _measured_peak(device, torch.bfloat16 if native else torch.float32), "measured"


def _measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the fastest square matrix product."""
    import torch
    from torch.utils.benchmark import Timer

    # Large enough to be compute-bound, small enough for many repetitions.
    side = 8192 if device.type == "cuda" else 1024
    a, b = torch.randn(2, side, side, device=device, dtype=dtype)
    timer = Timer("a @ b", globals={"a": a, "b": b}, num_threads=torch.get_num_threads())
    return 2 * side**3 / min(timer.blocked_autorange(min_run_time=0.1).times)


def memory_gib(device: torch.device) -> tuple[float, float]:
    """Memory use of this process in GiB. Returns (current, peak): PyTorch's allocations on a GPU, on a CPU the resident set."""
    import psutil
    import torch

    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / GIB, torch.cuda.max_memory_allocated(device) / GIB
    # Not getrusage's ru_maxrss: that starts from the parent's resident set at the time of the fork.
    high_water = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())  # KiB
    assert high_water  # Linux has this line
    return psutil.Process().memory_info().rss / GIB, int(high_water[1]) / 2**20
