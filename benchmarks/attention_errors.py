"""Errors of peripheral attention's Triton kernels and of PyTorch's own attention, both against float64.

    python -m benchmarks.attention_errors [--quick]

On a CUDA GPU the kernels run there; without one they run in Triton's interpreter on the CPU, which takes minutes. An error is the
largest difference over the largest number of the result or gradient. log Φp is -20, 0 or between; batches are odd.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

# (B, heads, N, head_dim): N from 4 (CIFAR-10 with PerViT) to 400, widths of PerViT-T, S and M, of DeiT, and the ends.
SHAPES = [
    (3, 2, 4, 70), (1, 2, 16, 8), (3, 1, 49, 26), (1, 2, 64, 64), (1, 1, 100, 45), (1, 1, 128, 58), (1, 1, 196, 32),
    (1, 1, 196, 57), (1, 1, 196, 70), (1, 1, 197, 64), (1, 1, 256, 128), (1, 1, 400, 39),
]  # fmt: skip
PARTS = ("out", "dq", "dk", "dv", "dphi")


def rows(device: str, quick: bool) -> list[str]:
    """Lines of a Markdown table; run with ``TRITON_INTERPRET=1`` where ``device`` is "cpu"."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from pipeline.kernels.peripheral import biased_attention, uses_triton
    from support.attention import errors, random_case

    lines = ["| B x heads x N x width | dtype | " + " | ".join(PARTS) + " |", "|---|---|" + "---|" * len(PARTS)]
    for shape in SHAPES[:3] if quick else SHAPES:
        for dtype in (torch.float32, torch.bfloat16) if shape[2] <= 100 else (torch.float32,):
            case = random_case(*shape, dtype, device)
            assert uses_triton(case[0][0]), "the kernels would not run"
            ours, plain = errors(*case), errors(*case, biased_attention)
            cells = " | ".join(f"{ours[part]:.1e} ({plain[part]:.1e})" for part in PARTS)
            lines.append(f"| {' x '.join(map(str, shape))} | {str(dtype).removeprefix('torch.')} | {cells} |")
            print(lines[-1], file=sys.stderr, flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three small shapes only")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before pipeline.kernels is imported
    print(f"Largest error over largest number, {device}; in brackets PyTorch's own attention\n")
    print("\n".join(rows(device, args.quick)))


if __name__ == "__main__":
    main()
