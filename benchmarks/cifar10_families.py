"""One model of each family on CIFAR-10 under the same small budget: the same steps, the same images, the same recipe.

    python benchmarks/cifar10_families.py --shards data/cifar10 [--steps 120] [--image-size 64]

The recipe is configs/cifar10.yaml, which is tuned for none of them. So few steps show how fast a family starts to learn, not
its final accuracy. LSAT's patch embedding needs a multiple of 7 pixels and gets the nearest.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pipeline.command_line import run_command
from pipeline.models.flops import count

MODELS = ["pervit_t", "deit_t", "convit_ti", "lsat_t_224", "posmlp_t"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", required=True, help="CIFAR-10, train and val")
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps of 64 images (default: 120)")
    parser.add_argument("--image-size", type=int, default=64, help="the images are enlarged to this (default: 64)")
    parser.add_argument("--models", nargs="*", default=MODELS, help=f"default: {' '.join(MODELS)}")
    args = parser.parse_args()
    print(
        "| model | pixels | parameters, M | GMACs | top-1, % | top-5, % | loss | minutes |\n|---|---|---|---|---|---|---|---|"
    )
    for name in args.models:
        size = args.image_size // 7 * 7 if name.startswith("lsat") else args.image_size
        cost = count(name, size, 10)
        started = time.monotonic()
        result = train(name, size, args.steps, args.shards)
        minutes = (time.monotonic() - started) / 60
        print(
            f"| `{name}` | {size} | {cost.params / 1e6:.1f} | {cost.gmacs:.3f} | {result['top1']:.1f} | {result['top5']:.1f} "
            f"| {result['loss']:.3f} | {minutes:.1f} |",
            flush=True,
        )


def train(name: str, image_size: int, steps: int, shards: str) -> dict:
    """Train from scratch in two processes and return the evaluation of the last step."""
    epochs = steps * 64 / 50_000
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            f"data.path={shards}",
            f"output_dir={folder}/run",
            f"model.name={name}",
            f"model.image_size={image_size}",
            f"train.epochs={epochs}",
            f"optim.warmup_epochs={epochs / 10}",
            "eval.every_epochs=null",
        ]
        command = ["bash", "launch/local.sh", "2", "--", "pipeline.train", "--config", "configs/cifar10.yaml", *overrides]
        subprocess.run(command, check=True, stdout=sys.stderr)
        return json.loads((Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()[-1])


if __name__ == "__main__":
    run_command(main)
