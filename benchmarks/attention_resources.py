"""What the Triton kernels of peripheral attention need on a GPU, read from code that is compiled without one.

    python -m benchmarks.attention_resources [--models pervit_t pervit_s pervit_m] [--capabilities 80 90 100]

For every head width of the models: registers of a thread, bytes of a thread that did not fit into registers (spills), and shared
memory of a program, as NVIDIA's cuobjdump reads them, and the instructions that read 2 bytes at a time, of which there should be none:
such reads cannot be copied to shared memory ahead of their use. A program is a block of 4 or 8 warps; 64 K registers and 164 (8.0), 228
(9.0, 10.0) or 100 KiB (8.6, 8.9, 12.0) of shared memory are there for all programs that run on a multiprocessor at once.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pipeline.kernels import fused, gradient_tiles, phi, tiles
from pipeline.kernels.peripheral import aligned_width

PHI_KERNELS = ("phi_forward", "phi_backward")
KERNELS = ("forward", "query_gradient", "key_value_gradient", "phi_gradient")
CAPABILITIES = (80, 90, 100)  # A100, H100 and H200, B200
TOKENS = 196
# Bytes that a program may have: on Hopper, elsewhere on the GPUs with the least (8.6, 8.9, 12.0).
MAX_SHARED = {80: 99 * 1024, 90: 227 * 1024, 100: 99 * 1024}
MAX_SPILLED = {80: 128, 90: 48, 100: 0}  # bytes of a thread; Ampere holds the factors of a product in registers too
_TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
_MATRIX = {8: r"mma\.sync", 9: r"wgmma\.mma_async", 10: r"tcgen05\.mma"}
_SUMS = ("log_phi", "log_sums", "deltas", "sums")  # always float32


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel needs."""

    registers: int  # of a thread
    spilled: int  # bytes of a thread
    shared: int  # bytes of a program
    warps: int  # of a program
    matrix: bool  # whether it uses the matrix instructions of its GPU
    atomic: bool  # whether programs add to the same number, in no fixed order
    narrow: int  # instructions that read 2 bytes
    copies: frozenset[int]  # bytes of those that copy to shared memory while the program goes on

    def __str__(self) -> str:
        return f"{self.registers} / {self.spilled} / {self.shared / 1024:.0f} / {self.warps} / {self.narrow}"


def compiled(
    kernel: str, heads: int, width: int, capability: int, tokens: int = TOKENS, dtype: torch.dtype = torch.bfloat16
) -> Resources:
    """Compile a kernel for the projection (B, N, 3, heads, aligned width) that the models pass."""
    function = getattr(tiles if kernel == "forward" else gradient_tiles, kernel)
    qkv = torch.empty(2, tokens, 3, heads, aligned_width(width, torch.device("cuda")), dtype=dtype, device="meta")
    log_phi = torch.empty(tokens, heads, tokens, device="meta").transpose(0, 1)  # as Φp's network returns it
    _, arguments = fused.launch(kernel, (capability // 10, capability % 10), qkv, log_phi, width)
    types = {
        name: "constexpr" if name in arguments else "i32" if name in ("images", "groups") else _TYPES[dtype]
        for name in function.arg_names
    } | {name: "*fp32" for name in _SUMS if name in function.arg_names}
    return _resources(function, types, arguments, capability)


def compiled_phi(kernel: str, heads: int, capability: int, side: int = 14, layers: int = 12) -> Resources:
    """Compile a kernel of Φp for a grid of side * side tokens."""
    function = getattr(phi, kernel)
    distance = torch.empty(side**2, 1, side + 4, side + 4, device="meta")
    kernel1 = torch.empty(layers * 4 * heads, 1, 3, 3, device="meta")
    kernel2 = torch.empty(layers * heads, 4 * heads, 3, 3, device="meta")
    _, arguments = phi.launch(kernel, distance, kernel1, kernel2, 1e-5)
    types = {name: "constexpr" if name in arguments else "*fp32" for name in function.arg_names}
    return _resources(function, types, arguments, capability)


def _resources(function: Any, types: dict[str, str], arguments: dict[str, Any], capability: int) -> Resources:
    options = {name: arguments.pop(name) for name in ("num_warps", "num_stages") if name in arguments}
    # PyTorch's allocations begin at multiples of 16 bytes, which Triton sees at the launch.
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(function.arg_names) if types[name].startswith("*")}
    source = ASTSource(function, types, arguments, aligned)
    code = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", _usage(code.asm["cubin"]))
    assert found, "cuobjdump printed no usage"
    registers, stack, local = map(int, found.groups())
    matrix, atomic = (
        re.search(pattern, code.asm["ptx"]) is not None
        for pattern in (_MATRIX[capability // 10], r"\b(atom|red)\.(global|relaxed|acq|async)")
    )
    narrow = len(re.findall(r"\bld\.global[.\w]*\.[bu]16\b", code.asm["ptx"]))
    copies = frozenset(int(size, 0) for size in re.findall(r"\bcp\.async\.c[ag]\.[^;]*?\], (\w+)", code.asm["ptx"]))
    return Resources(registers, stack + local, code.metadata.shared, options["num_warps"], matrix, atomic, narrow, copies)


def _usage(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        return subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout


def head_widths(model: str) -> list[tuple[int, int]]:
    """(heads, width of a head) of a PerViT, each once."""
    from pipeline.models import create_model
    from pipeline.models.pervit.model import PeripheralAttention

    with torch.device("meta"):
        modules = create_model(model).modules()
    return sorted({(m.heads, m.proj.in_features // m.heads) for m in modules if isinstance(m, PeripheralAttention)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["pervit_t", "pervit_s", "pervit_m"])
    parser.add_argument("--capabilities", nargs="+", type=int, default=list(CAPABILITIES))
    args = parser.parse_args()
    shapes = [(name, *shape) for name in args.models for shape in head_widths(name)]
    for capability in args.capabilities:
        print(
            f"\nCompute capability {capability / 10}: registers / spilled bytes / KiB of shared memory / warps / 2-byte reads, "
            f"{TOKENS} tokens, bf16\n"
        )
        print("| model | heads x width |", " | ".join(KERNELS), "|")
        print("|---|---|" + "---|" * len(KERNELS))
        for name, heads, width in shapes:
            cells = [compiled(kernel, heads, width, capability) for kernel in KERNELS]
            print(f"| {name} | {heads} x {width} |", " | ".join(map(str, cells)), "|", flush=True)
        for name, heads in sorted({(name, heads) for name, heads, _ in shapes}):
            cells = [compiled_phi(kernel, heads, capability) for kernel in PHI_KERNELS]
            print(f"{name}, {' and '.join(PHI_KERNELS)}: {', '.join(map(str, cells))}", flush=True)


if __name__ == "__main__":
    main()
