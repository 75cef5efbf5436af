"""Verify a shard set, for example after copying it.

    pervit verify-shards DIR [--decode] [--workers N]

Compares sizes, checksums, members and their order, indexes, labels and the sample table with each other and with
DIR/manifest.json, and checks that each shard is a random sample of all classes. --decode also decodes every image. Exits with 0
if the set is intact, and warns if val has the images of train; exits with 1 and a table of findings otherwise.

Examples:
    pervit verify-shards data/imagenet
    pervit verify-shards data/imagenet --decode --workers 16
"""

from __future__ import annotations

import os

from pipeline.command_line import command_parser, run_command
from pipeline.errors import UserError, counted
from pipeline.stores.place import RemotePath, place_argument


def main() -> int:
    parser = command_parser("data_prep.verify_shards", __doc__)
    parser.add_argument("folder", type=place_argument, help="the shard set: the folder that holds manifest.json")
    parser.add_argument("--decode", action="store_true", help="decode every image")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="default: one per core")
    args = parser.parse_args()
    if args.workers < 1:
        raise UserError(f"--workers must be at least 1, got {args.workers}", "pass a positive number")
    if isinstance(args.folder, RemotePath):
        raise UserError(
            f"the shard set must be in a folder, got {args.folder}",
            "copy the set to a disk first; what is read in training is verified in any case",
        )
    from data_prep.set_checks import print_table, same_images, verify  # imported late, so that --help is fast
    from pipeline.shards.manifest import ShardManifest

    manifest = ShardManifest.read(args.folder)
    findings = verify(args.folder, manifest, args.workers, args.decode)
    val = manifest.splits.get("val")
    if overlap := same_images(manifest.splits, "val", val.source["fingerprint"]) if val else "":
        print(f"warning: {args.folder}: {overlap}; shard again with --val-share 0.1, into an empty folder")
    if findings:
        print_table(findings)
        return 1
    counts = ", ".join(
        f"{split} {counted(info.samples, 'image')} in {counted(len(info.shards), 'shard')}{_subset(info.source)}"
        for split, info in manifest.splits.items()
    )
    print(
        f"{args.folder}: {'all files are intact' if overlap else 'all is well'} ({counts}{', every image decoded' if args.decode else ''})"
    )
    return 0


def _subset(source: dict) -> str:
    """Which images of the source a split holds, if not all."""
    if source.get("subset") in (None, 1):
        return ""
    return f", --subset {source['subset']:g} --subset-rule {source.get('subset_rule', 'random')}"


if __name__ == "__main__":
    run_command(main)
