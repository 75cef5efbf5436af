"""Write images into WebDataset shards.

    pervit shard --source IMAGES --output PLACE [--split train|val] [--subset FRACTION]

IMAGES is one of the following; archives are read in place. Images are .JPEG, .jpg, .png, .webp,
.tif, .tiff or .bmp files.
    a folder with train/<class>/*.JPEG and val/<class>/*.JPEG, or with <class>/*.JPEG for one split;
      test/<class>/ is used as val if there is no val/
    a .zip of such a folder
    ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar (with ILSVRC2012_devkit_t12.tar.gz beside it), or a folder with all three
    cifar-10-python.tar.gz or cifar-100-python.tar.gz
    an iNaturalist folder: train2019.json, val2019.json and the images that they list
    a .csv, .tsv or .jsonl with the columns path and label, and optionally split (train, val)
    a folder of parquet files with images, as Hugging Face stores data sets
    other WebDataset tars (KEY.jpg with KEY.cls or KEY.json): a folder, or a path or URL with {000..123} in it
The images of the last two are copied first, as they can only be read from front to back; the copy is removed at the end.

PLACE is a folder, or s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX. Each split becomes indexed tars, described by
manifest.json. A finished split is kept, an interrupted one is completed. Every image is decoded once to check it; reencoded.jsonl and
rejected.jsonl list re-encoded and rejected images.

Examples:
    pervit shard --source /data/imagenet --output data/imagenet --workers 16
    pervit shard --source my_photos --output data/my_photos --val-share 0.1
"""

from __future__ import annotations

import argparse
import os
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep import FEW_REJECTED, MAX_REJECTED, SPLITS, STAGED
from pipeline.command_line import command_parser, run_command
from pipeline.errors import UserError, counted
from pipeline.stores.place import parse_place

if TYPE_CHECKING:  # imported lazily at run time, so that --help and the workers start fast
    from data_prep.output import Output
    from data_prep.sources import Source
    from data_prep.writer import Share
    from pipeline.shards.image_checks import ImageRules
    from pipeline.shards.manifest import SplitInfo


def main() -> None:
    parser = command_parser("data_prep.shard_imagenet", __doc__)
    parser.add_argument("--source", required=True, help="images, in one of the formats above")
    parser.add_argument("--output", required=True, help="folder for the shards, or a URL as above")
    parser.add_argument("--split", choices=SPLITS, help="default: all splits of the source")
    parser.add_argument("--devkit", help="path of ILSVRC2012_devkit_t12.tar.gz if it is not beside ILSVRC2012_img_val.tar")
    parser.add_argument(
        "--class-names",
        type=Path,
        metavar="FILE",
        help="readable class names for tables, figures and predictions: one name per line in class order, WNID or CLASS<tab> and name per "
        "line, .json, .csv, or the devkit; ImageNet's tars take the devkit's names",
    )
    parser.add_argument("--keep-empty-classes", action="store_true", help="a class folder without images is a class too")
    parser.add_argument(
        "--unlabelled",
        choices=("refuse", "skip"),
        default="refuse",
        help="images whose label is empty, nan, negative or no whole number: an error (default), or left out",
    )
    parser.add_argument("--image-column", metavar="NAME", help="column in parquet files (default: by type and name)")
    parser.add_argument("--label-column", metavar="NAME", help="column in parquet files (default: by type and name)")
    parser.add_argument(
        "--classes",
        metavar="0-99|FILE",
        help="keep these classes alone: numbers in class order, from 0, or a file with one class per line",
    )
    parser.add_argument(
        "--subset",
        type=float,
        default=1.0,
        metavar="FRACTION",
        help="keep this fraction of each train class; val stays complete",
    )
    parser.add_argument(
        "--subset-rule",
        choices=("random", "first"),
        help="which images --subset keeps: random ones, chosen by --seed (default), or the first by file name, as in the papers' tables",
    )
    parser.add_argument(
        "--val-share",
        type=float,
        metavar="SHARE",
        help="for a source without a val split: this fraction of each class, chosen by --seed, becomes val and the rest train "
        "(rounded half up, at least 1 image; a class with a single image keeps it in train)",
    )
    parser.add_argument("--samples-per-shard", type=int, default=2000, help="default: 2000 (about 220 MB of ImageNet)")
    parser.add_argument(
        "--scratch",
        type=Path,
        metavar="DIR",
        help="with a URL: a local folder with space for one tar per worker, which is uploaded and removed (default: TMPDIR)",
    )
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="default: one per core")
    parser.add_argument(
        "--seed", type=int, default=0, help="for the order of the samples, --subset and --val-share (default: 0)"
    )
    add_writing_options(parser)
    args = parser.parse_args()
    rules, share = writing_options(args)
    for option, least in {"samples_per_shard": 1, "workers": 1, "seed": 0}.items():
        if (value := getattr(args, option)) < least:
            raise UserError(f"--{option.replace('_', '-')} must be at least {least}, got {value}", "pass a larger number")

    from data_prep.workers import stop_like_ctrl_c

    stop_like_ctrl_c()
    with _open_output(args) as output:
        _write(args, output, rules, share)


def _open_output(args: argparse.Namespace) -> Output:
    from data_prep.output import Output

    place = parse_place(args.output)
    if isinstance(place, Path):
        if args.scratch:
            raise UserError(f"--scratch requires an --output in a store, got the folder {place}", "leave it out")
        return Output(place)

    import tempfile

    from data_prep.store_output import StoreOutput

    return StoreOutput(place, args.scratch or Path(tempfile.gettempdir()), f"{args.split} {args.task} {args.tasks}")


def _write(args: argparse.Namespace, output: Output, rules: ImageRules, share: Share) -> None:
    from data_prep.class_names import put_class_names
    from data_prep.set_checks import classes_with_images, of_classes, same_images
    from data_prep.sources.staged import drop_copies
    from data_prep.writer import write_shards
    from pipeline.shards.manifest import REJECTED, ShardManifest

    sources = _open_sources(args, output)  # both, so that an error in either is found before hours of work
    for split, source in sources.items():
        classes = of_classes(source.classes_with_images(), source.class_names)
        print(f"{source.path}: {counted(len(source), 'image')} of {classes} for the {split} split")
    for sentence in dict.fromkeys(sentence for source in sources.values() for sentence in source.left_out()):
        print(f"{args.source}: {sentence}")
    names = _class_names(args, output, sources)
    for split, source in sources.items():
        started, before = time.monotonic(), _splits_in(output)
        if set(before) - {split} and (overlap := same_images(before, split, source.fingerprint())):
            print(f"warning: {args.output}: {overlap}; use --val-share 0.1 and an empty --output folder to hold out images")
        info = write_shards(
            source, output, split, args.samples_per_shard, args.workers, args.seed, rules, args.max_rejected, share, print
        )
        if info is None:
            print(f"{args.output}: wrote the {split} shards of task {share.task}; the last task to finish writes the manifest")
            continue
        if names and (args.class_names or split not in before):
            put_class_names(output, names)
        listed = ShardManifest.read(output.folder).classes
        classes = of_classes(classes_with_images(listed, info.samples_per_class), listed)
        about = (
            f"{counted(info.samples, 'image')} of {classes} in {counted(len(info.shards), 'shard')}, {info.bytes / 1e6:.1f} MB"
        )
        if split in before:
            print(f"{args.output}: {split} is already there, nothing was written ({about})")
            continue
        rejected = f"{info.rejected} rejected{f', listed in {REJECTED}' if info.rejected else ''}"
        print(
            f"{args.output}: {split} has {about}, {info.reencoded} re-encoded, {rejected} ({time.monotonic() - started:.1f} s)"
        )
        if info.formats:
            kept = ", ".join(f"{count} {suffix}" for suffix, count in info.formats.items())
            print(f"{args.output}: {split} keeps {sum(info.formats.values())} non-JPEG images unchanged: {kept}")
    drop_copies(output.folder / STAGED)


def _class_names(args: argparse.Namespace, output: Output, sources: dict[str, Source]) -> dict[str, str]:
    """Class -> name, of --class-names or the devkit; empty if there are none."""
    from data_prep.class_names import by_class, read_class_names

    source, manifest = next(iter(sources.values())), output.manifest()
    classes = manifest.classes if manifest else source.class_names
    if args.class_names:
        names = read_class_names(args.class_names, classes)
    elif all(key in source.class_words for key in classes):
        names = by_class(source.class_words.items(), classes, source.path)
    else:
        return {}
    print(f"{args.output}: {counted(len(names), 'class')} have names: {classes[0]} is {names[0]!r}")
    return dict(zip(classes, names))


def _splits_in(output: Output) -> dict[str, SplitInfo]:
    """The splits listed in the manifest, if there is one."""
    manifest = output.manifest()
    return manifest.splits if manifest else {}


def _kept(args: argparse.Namespace, source: Source) -> Source:
    """A split without the classes that ``--classes`` leaves out."""
    from data_prep.sources import take_classes

    return source if args.classes is None else take_classes(source, args.classes)


def _open_sources(args: argparse.Namespace, output: Output) -> dict[str, Source]:
    from data_prep.job import refuse_untaught_classes
    from data_prep.set_checks import unseen_classes
    from data_prep.sources import RANDOM, Reading, check_fraction, hold_out, open_sources, take_subset

    stage = None if args.tasks > 1 else output.folder / STAGED
    finished, skip = frozenset(_splits_in(output)), args.unlabelled == "skip"
    reading = Reading(stage, finished, args.image_column, args.label_column, skip, args.keep_empty_classes)

    check_fraction(args.subset)
    if args.subset_rule and args.subset == 1:
        raise UserError(f"--subset-rule {args.subset_rule} requires --subset", "pass --subset FRACTION, or drop it")
    if args.val_share is None:
        sources = open_sources(args.source, args.split, args.devkit, reading)
    else:
        if not 0 < args.val_share < 1:
            raise UserError(f"--val-share must be above 0 and below 1, got {args.val_share:g}", "pass a fraction such as 0.1")
        sources = open_sources(args.source, None, args.devkit, reading)
        if list(sources) != ["train"]:
            raise UserError(
                f"--val-share requires a source with the split train alone, got {list(sources)} in {args.source}",
                "drop --val-share",
            )
        both = dict(zip(SPLITS, hold_out(_kept(args, sources["train"]), args.val_share, args.seed)))
        sources = {args.split: both[args.split]} if args.split else both
    if args.val_share is None:
        sources = {name: _kept(args, source) for name, source in sources.items()}
    if args.subset != 1 and "train" not in sources:
        raise UserError(f"--subset requires a train split, got only {list(sources)}, which stays complete", "drop --subset")
    if len(sources) > 1:
        train, val = (sources[name].classes_with_images() for name in SPLITS)
        refuse_untaught_classes(args.source, train, val)
        if missing := unseen_classes(train, val):
            print(f"warning: {args.source}: {missing}")
    elif not args.split and "train" in sources:
        print(
            f"{args.source}: there is no val split, which training needs: --val-share 0.1 would hold one out from these images"
        )
    if "train" in sources:
        sources["train"] = take_subset(sources["train"], args.subset, args.seed, args.subset_rule or RANDOM)
    return sources


def add_writing_options(parser: argparse.ArgumentParser) -> None:
    """Add the options on how images are checked and stored, and on job arrays."""
    parser.add_argument(
        "--no-check",
        action="store_true",
        help="parse headers only, without decoding; damaged images are then found only in training",
    )
    parser.add_argument(
        "--max-rejected",
        type=float,
        default=MAX_REJECTED,
        metavar="SHARE",
        help=f"stop when more than this fraction of the images cannot be decoded (default: {MAX_REJECTED}); above 0, {FEW_REJECTED} always may be",
    )
    parser.add_argument("--resize-short-side", type=int, metavar="PX", help="resize larger images to a short side of PX pixels")
    parser.add_argument("--quality", type=int, metavar="Q", help="JPEG quality of resized images, 1 to 100 (default: 90)")
    parser.add_argument(
        "--task", type=int, default=0, metavar="I", help="index in a job array: write shards I, I+N, I+2N, ... only"
    )
    parser.add_argument("--tasks", type=int, default=1, metavar="N", help="number of tasks in the job array (default: 1)")


def writing_options(args: argparse.Namespace) -> tuple[ImageRules, Share]:
    """Validate the options of :func:`add_writing_options`.

    Raises:
        UserError: a value out of range.
    """
    from data_prep.writer import Share
    from pipeline.shards.image_checks import ImageRules

    if not 0 <= args.max_rejected <= 1:
        raise UserError(f"--max-rejected must be 0 to 1, got {args.max_rejected:g}", "pass a fraction of the images")
    if args.resize_short_side is not None and args.resize_short_side < 1:
        raise UserError(f"--resize-short-side must be at least 1, got {args.resize_short_side}", "pass a number of pixels")
    if args.quality is not None and args.resize_short_side is None:
        raise UserError(
            f"--quality {args.quality} requires --resize-short-side",
            "pass both, or neither: images of full size are stored unchanged",
        )
    if args.quality is not None and not 1 <= args.quality <= 100:
        raise UserError(f"--quality must be 1 to 100, got {args.quality}", "pass a JPEG quality")
    if args.tasks < 1 or not 0 <= args.task < args.tasks:
        raise UserError(
            f"--task must be 0 to {max(args.tasks, 1) - 1} with --tasks {args.tasks}, got {args.task}", "pass another one"
        )
    rules = ImageRules(not args.no_check, args.resize_short_side, args.quality or ImageRules.quality)
    return rules, Share(args.task, args.tasks)


command = partial(run_command, main)  # what the script pervit-shard calls

if __name__ == "__main__":
    command()
