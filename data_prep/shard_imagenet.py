"""Write images into WebDataset shards.

    python data_prep/shard_imagenet.py --source IMAGES --output DIR [--split train|val] [--subset FRACTION]

IMAGES is one of these; nothing is unpacked. Images may be .JPEG, .jpg or .png.
    a folder of train/<class>/*.JPEG and val/<class>/*.JPEG, or of <class>/*.JPEG for one split;
      test/<class>/ is taken as val where there is no val/
    a .zip of such a folder
    ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar (with ILSVRC2012_devkit_t12.tar.gz beside it), or a folder with all three
    cifar-10-python.tar.gz or cifar-100-python.tar.gz
    an iNaturalist folder: train2019.json, val2019.json and the images that they name

Each split becomes tars with their indexes in DIR, described by DIR/manifest.json. A finished split is left as it is.
"""

from __future__ import annotations

import argparse
import os
import time

from data_prep.sources import SPLITS, Source, check_fraction, open_sources, take_subset
from data_prep.writer import write_shards
from pipeline.errors import UserError, run_command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, help="images, in one of the forms above")
    parser.add_argument("--output", required=True, help="folder for the shards")
    parser.add_argument("--split", choices=SPLITS, help="default: every split that the source has")
    parser.add_argument("--devkit", help="ILSVRC2012_devkit_t12.tar.gz, when it does not lie beside ILSVRC2012_img_val.tar")
    parser.add_argument(
        "--subset",
        type=float,
        default=1.0,
        metavar="FRACTION",
        help="keep this share of each train class, by --seed; val stays whole",
    )
    parser.add_argument("--samples-per-shard", type=int, default=2000, help="default: 2000 (about 220 MB of ImageNet)")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="default: one per core")
    parser.add_argument("--seed", type=int, default=0, help="of the samples' order and of --subset (default: 0)")
    args = parser.parse_args()
    for option in ("samples_per_shard", "workers"):
        if getattr(args, option) < 1:
            raise UserError(
                f"--{option.replace('_', '-')} is {getattr(args, option)}, at least 1 needed: pass a positive number."
            )
    if args.seed < 0:
        raise UserError(f"--seed is {args.seed}, at least 0 needed: pass a non-negative number.")

    sources = _open_sources(args)  # a mistake in one is found before hours of work
    for split, source in sources.items():
        classes = len(set(source.labels.tolist()))
        print(f"{source.path}: {len(source)} images of {classes} classes are taken as the {split} split")
        if source.ignored:
            print(f"{source.path}: {source.ignored} other files are not class/*.JPEG, *.jpg or *.png and are left out")
        started = time.monotonic()
        info = write_shards(source, args.output, split, args.samples_per_shard, args.workers, args.seed)
        print(
            f"{args.output}: {split} has {info.samples} images of {sum(n > 0 for n in info.samples_per_class)} classes in "
            f"{len(info.shards)} shards, {info.bytes / 1e6:.1f} MB ({time.monotonic() - started:.1f} s)"
        )


def _open_sources(args: argparse.Namespace) -> dict[str, Source]:
    check_fraction(args.subset)
    sources = open_sources(args.source, args.split, args.devkit)
    if args.subset != 1 and "train" not in sources:
        raise UserError(f"--subset is {args.subset}, but only {list(sources)} is written and stays whole: drop --subset.")
    return {
        name: take_subset(source, args.subset, args.seed) if name == "train" else source for name, source in sources.items()
    }


if __name__ == "__main__":
    run_command(main)
