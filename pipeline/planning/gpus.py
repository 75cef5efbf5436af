"""The kinds of GPU that a plan knows, with the figures of their data sheets."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.errors import UserError

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU.

    Attributes:
        memory: bytes that a process can allocate: the device's total less what the driver keeps.
        bf16_flops: per second, dense matrix products with fp32 accumulation, 2 per multiply-accumulate; None: no bf16.
        fp32_flops: per second, outside of tensor cores or with TF32 off.
        bandwidth: of its memory, bytes per second.
        link: to the other GPUs of its node, bytes per second in each direction.
        source: of the figures.
    """

    name: str
    memory: int
    bf16_flops: float | None
    fp32_flops: float
    bandwidth: float
    link: float
    source: str


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("v100-32g", int(31.7 * GIB), None, 15.7e12, 0.90e12, 150e9, "NVIDIA V100 data sheet, SXM2"),
        Gpu("a100-40g", int(39.4 * GIB), 312e12, 19.5e12, 1.555e12, 300e9, "NVIDIA A100 data sheet, SXM"),
        Gpu("a100-80g", int(79.2 * GIB), 312e12, 19.5e12, 2.039e12, 300e9, "NVIDIA A100 data sheet, SXM"),
        Gpu("h100-80g", int(79.1 * GIB), 989e12, 67e12, 3.35e12, 450e9, "NVIDIA H100 data sheet, SXM"),
        Gpu("h200-141g", int(139.8 * GIB), 989e12, 67e12, 4.8e12, 450e9, "NVIDIA H200 data sheet, SXM"),
        Gpu("l40s-48g", int(44.5 * GIB), 362e12, 91.6e12, 0.864e12, 32e9, "NVIDIA L40S data sheet, PCIe 4"),
        Gpu("rtx4090-24g", int(23.5 * GIB), 165e12, 82.6e12, 1.008e12, 32e9, "NVIDIA Ada GPU architecture, PCIe 4"),
    )
}
DEFAULT = "h100-80g"


def gpu_named(name: str) -> Gpu:
    """Look a kind of GPU up.

    Raises:
        UserError: an unknown name.
    """
    if name not in GPUS:
        raise UserError(f"--gpu is {name!r}, one of {', '.join(GPUS)} needed", "take the one closest in memory")
    return GPUS[name]
