"""The arithmetic of docs/scale.md: what a run of 8, 64 and 512 GPUs asks of loader, network, storage and recovery.

    python benchmarks/scale_arithmetic.py [--images-per-second 1000]

Everything is a product of the figures below; each has its source. `pervit plan` gives those of your own config and data.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from pipeline.planning.length import IMAGE_BYTES, RECIPE_SECONDS  # measured: docs/results/loader.md

# Measured here (docs/results/).
TABLE_BYTES = 32  # of the index, a sample: pipeline/shards/manifest.py
PARAMETERS, BYTES_PER_PARAMETER = 43.72e6, 12  # PerViT-M; weights and AdamW's moments in fp32: 525 MB, "Checkpoints"
OPENS_PER_RANK = 20  # of a checkpoint's files at a start: "A checkpoint of many ranks"
# From a config: the defaults of docs/config.md, and configs/pervit_m.yaml.
BATCH_PER_GPU, SAVE_EVERY, SILENCE = 128, 1000, 60.0
# Assumed: seconds from the requeue to the first new step. Imports, rendezvous, checkpoint and compiling; Slurm's queue comes on top.
RESTART = 180.0
# Published: Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters", HPCA 2025: 6.50 failures in a
# thousand days of a node of 8 GPUs (RSC-1). The Llama 3 report (2024) has 419 in 54 days of 16,384 GPUs, 3.8 in these units.
FAILURES_PER_NODE_DAY = 6.50e-3
NODE = 8  # GPUs


@dataclass(frozen=True)
class Data:
    name: str
    images: int
    bytes: float  # of an image, on average
    epochs: int


DATA = (
    Data("ImageNet-1k", 1_281_167, IMAGE_BYTES, 300),  # 140 GB; the recipe's length
    Data("ImageNet-21k", 14_197_122, 92e3, 90),  # 1.3 TB (Deng et al., 2009; the full release); a usual length of pre-training
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images-per-second", type=float, default=1000, help="of one GPU (default: 1000, a round figure)")
    args = parser.parse_args()
    pace = args.images_per_second
    rows: dict[str, list[str]] = {}

    def add(name: str, value: str) -> None:
        rows.setdefault(name, []).append(value)

    for data in DATA:
        for gpus in (8, 64, 512):
            everything, nodes = gpus * pace, gpus // NODE
            epoch = data.images / everything  # seconds
            days = data.epochs * epoch / 86400
            steps = data.images * data.epochs / (gpus * BATCH_PER_GPU)
            step = BATCH_PER_GPU / pace
            add("", f"{data.name}, {data.epochs} epochs, {gpus} GPUs")
            add("epoch, minutes", f"{epoch / 60:.1f}")
            add("all epochs, days", f"{days:.2f}")
            add("global batch", f"{gpus * BATCH_PER_GPU:,}")
            add("images/s, all GPUs", f"{everything:,.0f}")
            add("CPU cores per GPU, decoding there, whole recipe", f"{pace * RECIPE_SECONDS:.1f}")
            add("read from storage or caches, GB/s", f"{everything * data.bytes / 1e9:.2f}")
            add("read per node, GB/s", f"{everything * data.bytes / nodes / 1e9:.2f}")
            add("requests/s to a store, order full", f"{everything:,.0f}")
            add("requests/s to a store, blocks of 256", f"{everything / 256:,.0f}")
            add("data set on each node's disk, GB", f"{data.images * data.bytes / 1e9:,.0f}")
            add("filling the caches once, TB from storage", f"{nodes * data.images * data.bytes / 1e12:.1f}")
            add("index, MB (shared by a node)", f"{data.images * TABLE_BYTES / 1e6:,.0f}")
            size = PARAMETERS * BYTES_PER_PARAMETER
            add("checkpoint, MB and files", f"{size / 1e6:,.0f} in {gpus} (ZeRO 1-3), {min(gpus, 16)} (ZeRO 0)")
            add("a checkpoint every, minutes", f"{SAVE_EVERY * step / 60:.1f}")
            add("checkpoints of the run", f"{steps / SAVE_EVERY:,.0f}")
            add("opens of files at a restart", f"{gpus * OPENS_PER_RANK:,}")
            failures = nodes * FAILURES_PER_NODE_DAY
            add("failures a day", f"{failures:.2f}")
            add("failures of the run", f"{failures * days:.2f}")
            lost = (SILENCE + RESTART + SAVE_EVERY * step / 2) / 3600 * gpus
            again = (SILENCE + RESTART + epoch / 2) / 3600 * gpus
            add("a failure costs, GPU hours", f"{lost:.1f}")
            add("... restarting the epoch instead", f"{again:.1f}")
            add("... restarting the run instead", f"{(days * 24 / 2) * gpus:,.0f}")
    for number, (name, cells) in enumerate(rows.items()):
        print(f"| {name} | " + " | ".join(cells) + " |")
        if number == 0:
            print("|---" * (len(cells) + 1) + "|")


if __name__ == "__main__":
    main()
