"""Write images into WebDataset shards.

    python data_prep/shard_imagenet.py --source IMAGES --output DIR [--split train|val]

IMAGES is a tree train/<class>/*.JPEG and val/<class>/*.JPEG, or <class>/*.JPEG for one split. Each split becomes
tars with their indexes in DIR, described by DIR/manifest.json. A finished split is left as it is.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from data_prep.sources import SPLITS, ImageFolder, available_splits
from data_prep.writer import write_shards
from pipeline.errors import UserError, run_command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, help="folder of images")
    parser.add_argument("--output", required=True, help="folder for the shards")
    parser.add_argument("--split", choices=SPLITS, help="default: every split that the source has")
    parser.add_argument("--samples-per-shard", type=int, default=2000, help="default: 2000 (about 220 MB of ImageNet)")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="default: one per core")
    parser.add_argument("--seed", type=int, default=0, help="of the order in which samples are written (default: 0)")
    args = parser.parse_args()
    for option in ("samples_per_shard", "workers"):
        if getattr(args, option) < 1:
            raise UserError(
                f"--{option.replace('_', '-')} is {getattr(args, option)}, at least 1 needed: pass a positive number."
            )
    if args.seed < 0:
        raise UserError(f"--seed is {args.seed}, at least 0 needed: pass a non-negative number.")

    splits = [args.split] if args.split else available_splits(Path(args.source))
    if not splits:
        print(f"{args.source} has no train/ or val/ folder: its class folders are taken as the train split.")
        splits = ["train"]
    sources = {split: ImageFolder(args.source, split) for split in splits}  # a mistake in one is found before hours of work
    for split, source in sources.items():
        if source.ignored:
            print(f"{args.source}: {source.ignored} entries of the {split} class folders are not *.JPEG files and are left out")
        started = time.monotonic()
        info = write_shards(source, args.output, split, args.samples_per_shard, args.workers, args.seed)
        print(
            f"{args.output}: {split} has {info.samples} images of {sum(n > 0 for n in info.samples_per_class)} classes in "
            f"{len(info.shards)} shards, {info.bytes / 1e6:.1f} MB ({time.monotonic() - started:.1f} s)"
        )


if __name__ == "__main__":
    run_command(main)
