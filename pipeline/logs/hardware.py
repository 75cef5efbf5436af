"""Peak FLOP/s, bf16 support and memory of the device."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import psutil
import torch

# Dense bf16 tensor-core peak in 1e12 FLOP/s, without sparsity, from NVIDIA's data sheets.
BF16_PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,  # SXM
    "A100": 312.0,
    "L40S": 362.0,
    "A40": 149.7,
    "A30": 165.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
}
# Instruction sets for bf16 matrix products on x86 CPUs, as PyTorch reports them.
_BF16_INSTRUCTIONS = {
    "AVX512-BF16": torch.cpu._is_avx512_bf16_supported,
    "AMX": torch.cpu._is_amx_tile_supported,
}


def native_bf16(device: torch.device) -> tuple[bool, str]:
    """Whether a device has bf16 instructions; without them bf16 is emulated, and slow.

    Returns:
        The answer, and the reason as half a sentence.
    """
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        name = f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}"
        return (major >= 8, name if major >= 8 else f"{name}, 8.0 needed for bf16")
    found = [name for name, has in _BF16_INSTRUCTIONS.items() if has()]
    if not found:
        return False, "this CPU has no bf16 instructions (AVX512-BF16 or AMX)"
    # PyTorch multiplies with oneDNN, which obeys ONEDNN_MAX_CPU_ISA.
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False, f"this CPU has {found[0]}, but ONEDNN_MAX_CPU_ISA={os.environ.get('ONEDNN_MAX_CPU_ISA')} does without"
    return True, f"this CPU has {found[0]}"


def peak_flops(device: torch.device, precision: str) -> tuple[float, str]:
    """Peak FLOP/s of one rank's device.

    Emulated bf16 is measured against the fp32 peak, since it runs on fp32 instructions: the utilization stays below 100 %.

    Returns:
        FLOP/s, and the source of the figure ("data sheet" or "measured").
    """
    if device.type == "cuda" and precision == "bf16":
        name = torch.cuda.get_device_name(device)
        whole_card = "MIG" not in name and "Laptop" not in name
        for known, teraflops in BF16_PEAK_TFLOPS.items():
            if whole_card and re.search(rf"\b{known}\b", name):
                return teraflops * 1e12, "data sheet"
    native = precision == "bf16" and native_bf16(device)[0]
    return _measured_peak(device, torch.bfloat16 if native else torch.float32), "measured"


def _measured_peak(device: torch.device, dtype: torch.dtype, seconds: float = 0.1) -> float:
    """FLOP/s of the fastest square matrix product within ``seconds``."""
    side = 8192 if device.type == "cuda" else 1024  # large enough to be compute-bound, small enough for many repetitions
    a, b = torch.randn(2, side, side, device=device, dtype=dtype)
    best = float("inf")
    end = time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < end:
        _synchronize(device)
        started = time.perf_counter()
        a @ b
        _synchronize(device)
        best = min(best, time.perf_counter() - started)
    return 2 * side**3 / best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory_gib(device: torch.device) -> tuple[float, float]:
    """Memory use of this process in GiB.

    Returns:
        (current, peak): PyTorch's allocations on a GPU, the resident set size on a CPU.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / 2**30, torch.cuda.max_memory_allocated(device) / 2**30
    # Not getrusage's ru_maxrss: that starts from the parent's resident set at the time of the fork.
    status = Path("/proc/self/status").read_text()
    high_water = re.search(r"VmHWM:\s*(\d+)", status)
    assert high_water  # Linux has this line
    peak_kib = int(high_water[1])
    return psutil.Process().memory_info().rss / 2**30, peak_kib / 2**20
