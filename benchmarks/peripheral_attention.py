"""Our implementation of peripheral attention against the authors' implementation of the same function.

    python benchmarks/peripheral_attention.py [--model pervit_t] [--batch 16] [--rounds 7]
    python benchmarks/peripheral_attention.py --errors | --resources

``--errors`` prints the errors of the Triton kernels against float64 (attention_errors.py), ``--resources`` what they need on a GPU
(attention_resources.py); neither needs one. Without them:

Two changes preserve all results (the tests compare them) and are measured separately: fused attention with log Φp as a bias
instead of Normalize[exp(..) * Φp] V, and Φp's first convolution of one map with a summed kernel instead of 4 x heads maps.
Forward and backward pass of the whole model at 224 px, rounds interleaved, medians; compare the ratios.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.models import create_model
from pipeline.models.pervit.model import PeripheralAttention
from pipeline.models.pervit.position import FirstProjection


class PublishedAttention(PeripheralAttention):
    """Eq. 3 as the published code computes it: every (N, N) matrix of every image is written to memory."""

    def forward(self, x: Tensor, log_phi: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, heads, N, head_dim) each
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5  # (B, heads, N, N)
        weights = (scores - scores.amax(-1, keepdim=True)).exp() * log_phi.exp().to(scores.dtype)
        out = F.normalize(weights, p=1, dim=-1) @ v  # (B, heads, N, head_dim)
        return self.proj(out.transpose(1, 2).reshape(batch, tokens, width))


class PublishedProjection(FirstProjection):
    """Peripheral projection of the built tensor R, (N, 4 * heads, H + 4, W + 4)."""

    def forward(self, distance: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
        r = distance * scale[:, None, None] + offset[:, None, None]
        return F.conv2d(r, self.weight, self.bias)


def build(name: str, fused: bool, folded: bool, device: torch.device) -> nn.Module:
    model = create_model(name).to(device)
    for module in model.modules():
        if isinstance(module, PeripheralAttention) and not fused:
            module.__class__ = PublishedAttention
        if isinstance(module, FirstProjection) and not folded:
            module.__class__ = PublishedProjection
    return model


def milliseconds(call, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pervit_t")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--errors", action="store_true")
    parser.add_argument("--resources", action="store_true")
    args = parser.parse_args()
    if args.errors or args.resources:  # processes of their own: they choose how Triton runs its kernels before it is loaded
        tables = [name for name in ("errors", "resources") if getattr(args, name)]
        for name in tables:
            subprocess.run([sys.executable, "-m", f"benchmarks.attention_{name}"], cwd=Path(__file__).parents[1], check=True)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images = torch.randn(args.batch, 3, 224, 224, device=device)
    forms = {
        "ours": (True, True),
        "published attention": (False, True),
        "published Φp": (True, False),
        "published both": (False, False),
    }
    models = {form: build(args.model, *switches, device) for form, switches in forms.items()}

    def phi(model: nn.Module) -> None:
        torch.stack([layer.sum() for layer in model.log_phi((14, 14))]).sum().backward()

    def step(model: nn.Module) -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(images).float().square().mean()
        loss.backward()

    times = {form: {"step": [], "phi": []} for form in forms}
    for round_ in range(args.rounds + 1):
        for form, model in models.items():
            phi_ms = milliseconds(lambda model=model: phi(model), device)
            step_ms = milliseconds(lambda model=model: step(model), device)
            if round_ > 0:  # the first is a warm-up
                times[form]["phi"].append(phi_ms)
                times[form]["step"].append(step_ms)

    ours = {part: statistics.median(values) for part, values in times["ours"].items()}
    print(f"{args.model}, batch {args.batch}, bf16, {device.type}, medians of {args.rounds} rounds; ratio: to ours")
    print(f"{'form':<22}{'step ms':>10}{'ratio':>8}{'of which Φp ms':>17}{'ratio':>8}{'Φp share':>10}")
    for form, parts in times.items():
        step_ms, phi_ms = statistics.median(parts["step"]), statistics.median(parts["phi"])
        print(
            f"{form:<22}{step_ms:>10.1f}{step_ms / ours['step']:>8.2f}{phi_ms:>17.1f}{phi_ms / ours['phi']:>8.2f}{phi_ms / step_ms:>10.1%}"
        )


if __name__ == "__main__":
    main()
