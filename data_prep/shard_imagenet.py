"""Write images into WebDataset shards.

    python data_prep/shard_imagenet.py --source IMAGES --output DIR [--split train|val]

IMAGES is a tree train/<class>/*.JPEG and val/<class>/*.JPEG, or <class>/*.JPEG for one split. Each split becomes
tars with their indexes in DIR, described by DIR/manifest.json. A finished split is left as it is, an unfinished one is
finished. Every image is decoded once: DIR/reencoded.jsonl lists those that were brought into another form, DIR/rejected.jsonl
those that were left out.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from data_prep.checks import ImageRules
from data_prep.sources import SPLITS, ImageFolder, available_splits
from data_prep.writer import MAX_REJECTED, Share, write_shards
from pipeline.errors import UserError, run_command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, help="folder of images")
    parser.add_argument("--output", required=True, help="folder for the shards")
    parser.add_argument("--split", choices=SPLITS, help="default: every split that the source has")
    parser.add_argument("--samples-per-shard", type=int, default=2000, help="default: 2000 (about 220 MB of ImageNet)")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="default: one per core")
    parser.add_argument("--seed", type=int, default=0, help="of the order in which samples are written (default: 0)")
    add_writing_options(parser)
    args = parser.parse_args()
    rules, share = writing_options(args)
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
        info = write_shards(
            source, args.output, split, args.samples_per_shard, args.workers, args.seed, rules, args.max_rejected, share
        )
        if info is None:
            print(
                f"{args.output}: {split} shards of task {share.task} are written; the task that finishes last writes the manifest"
            )
            continue
        print(
            f"{args.output}: {split} has {info.samples} images of {sum(n > 0 for n in info.samples_per_class)} classes in "
            f"{len(info.shards)} shards, {info.bytes / 1e6:.1f} MB, {info.reencoded} encoded anew, {info.rejected} rejected "
            f"({time.monotonic() - started:.1f} s)"
        )


def add_writing_options(parser: argparse.ArgumentParser) -> None:
    """How images are checked and stored, and how much of the work is this process's."""
    parser.add_argument(
        "--no-check", action="store_true", help="look at headers only; a damaged image then stops a training run"
    )
    parser.add_argument(
        "--max-rejected",
        type=float,
        default=MAX_REJECTED,
        metavar="SHARE",
        help=f"stop when more than this share of the images cannot be decoded (default: {MAX_REJECTED})",
    )
    parser.add_argument(
        "--resize-short-side", type=int, metavar="PX", help="store larger images with a short side of PX pixels"
    )
    parser.add_argument("--quality", type=int, metavar="Q", help="JPEG quality of resized images, 1 to 100 (default: 90)")
    parser.add_argument("--task", type=int, default=0, metavar="I", help="of a job array: write shards I, I+N, I+2N, ...")
    parser.add_argument("--tasks", type=int, default=1, metavar="N", help="how many tasks the job array has (default: 1)")


def writing_options(args: argparse.Namespace) -> tuple[ImageRules, Share]:
    """The options of :func:`add_writing_options`.

    Raises:
        UserError: a number that makes no sense.
    """
    if not 0 <= args.max_rejected <= 1:
        raise UserError(f"--max-rejected is {args.max_rejected:g}, 0 to 1 needed: pass a share of the images.")
    if args.resize_short_side is not None and args.resize_short_side < 1:
        raise UserError(f"--resize-short-side is {args.resize_short_side}, at least 1 needed: pass a number of pixels.")
    if args.quality is not None and args.resize_short_side is None:
        raise UserError(
            f"--quality is {args.quality} without --resize-short-side, both needed: images of full size stay as they are."
        )
    if args.quality is not None and not 1 <= args.quality <= 100:
        raise UserError(f"--quality is {args.quality}, 1 to 100 needed: pass a JPEG quality.")
    if args.tasks < 1 or not 0 <= args.task < args.tasks:
        raise UserError(f"--task {args.task} --tasks {args.tasks}: a task from 0 to {max(args.tasks, 1) - 1} needed.")
    rules = ImageRules(not args.no_check, args.resize_short_side, args.quality or ImageRules.quality)
    return rules, Share(args.task, args.tasks)


if __name__ == "__main__":
    run_command(main)
