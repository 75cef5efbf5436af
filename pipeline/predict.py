"""Predict the classes of images with a trained model.

    pervit predict runs/pervit_t cat.jpg holiday/ "archive/*.png"
    pervit predict pervit_t.safetensors photos.zip shards/ --output predictions.csv
    find / -name "*.jpg" | pervit predict runs/pervit_t - --output predictions.parquet
    pervit predict runs/pervit_t val/ --by-folder
    pervit predict runs/pervit_t photos/ --features --output features.npy

IMAGES are files, folders (searched at any depth), patterns, .tar and .zip files, shard sets, @FILE for a list with one name per line, or -
for one on standard input. They are prepared as in an evaluation. An image that cannot be used is a row with the reason; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.command_line import begins_anew, command_parser, interrupted_later, run_command
from pipeline.errors import UserError, counted
from pipeline.inference.session import SOURCES, add_model_options, open_session, read_asked
from pipeline.metrics import tells_top5
from pipeline.stores.place import place_argument
from pipeline.terminal import fitted, paint

if TYPE_CHECKING:
    from pipeline.inference.prediction import RankRows, Tally
    from pipeline.inference.prediction_table import Merged, Names

SOME_FAILED = 1  # exit code: at least one image has no prediction
_SHOWN = 50  # rows of the table on a terminal


@begins_anew
def main() -> int:
    parser = command_parser("pipeline.predict", __doc__)
    add = parser.add_argument
    add("checkpoint", type=place_argument, metavar="CHECKPOINT", help=SOURCES)
    add("images", nargs="+", metavar="IMAGES", help="what to predict; see above")
    add("--top", type=int, default=5, metavar="N", help="classes per image (default: 5)")
    add("--output", type=Path, metavar="FILE", help="a .csv, .jsonl or .parquet file; with --features .npy or .parquet")
    add("--features", action="store_true", help="write the input of the classifier, (images, width), instead of classes")
    add("--by-folder", action="store_true", help="also report the accuracy: each image's folder is named after its class")
    add_model_options(parser)
    return run(parser.parse_args())


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code. Collective."""
    check_arguments(args)
    from pipeline.logs.console import stage

    with stage("loading the libraries"), interrupted_later():
        from pipeline.cluster.rendezvous import disconnect
        from pipeline.inference.evaluation import evaluation_loader
        from pipeline.inference.image_list import ImageList, find_images, read_list
        from pipeline.inference.prediction import RankRows, predict
        from pipeline.inference.prediction_table import Names, features_dtype, prediction_dtype
        from pipeline.step.precision import autocast

    with stage(f"reading {args.checkpoint}"):
        trained, config = read_asked(args)
        config = config.with_values({"data.max_bad_samples": 2**31 - 1})
        model = trained.build_model()
        world, precision = open_session(model, config.train.precision, args)
    lines = read_list(sys.stdin.buffer) if world.is_main and "-" in args.images else iter(())
    if world.size > 1:  # the input is rank 0's; alone, one name is in memory at a time until it is packed
        lines = iter(world.from_main(list(lines)))
    with stage("listing the images"):
        images = ImageList(find_images(args.images, lines), trained.classes, args.by_folder)
    top = min(args.top, len(trained.classes))
    width = model.pooled_width if args.features else 0
    loader = evaluation_loader(images, config, world)
    with tempfile.TemporaryDirectory() as scratch:
        beside = args.output or Path(world.from_main(scratch), "predictions")
        with RankRows(beside, features_dtype(width) if args.features else prediction_dtype(top), loader.batches, world) as rows:
            forward = autocast(world.device, precision.name)(model.pooled if args.features else model)
            predict(forward, None if args.features else top, loader, images, rows)
            loader.close()
            tally = write(args, rows, Names(images.key, trained.classes, trained.shown), len(images), width)
        failed = world.from_main(tally.errors)
        disconnect()
    return SOME_FAILED if failed else 0


def check_arguments(args: argparse.Namespace) -> None:
    """Check the arguments before anything is loaded."""
    if args.top < 1:
        raise UserError(f"--top must be at least 1, got {args.top}", "pass a number of classes")
    if args.features and not args.output:
        raise UserError("--features requires --output", "add --output FILE.npy or --output FILE.parquet")
    if args.features and args.by_folder:
        raise UserError("--features and --by-folder exclude each other: features have no accuracy", "leave one out")
    if args.output:
        from pipeline.inference.prediction_table import ENDINGS, FEATURE_ENDINGS, check_file

        check_file("--output", args.output, FEATURE_ENDINGS if args.features else ENDINGS)
    from pipeline.checkpoint.bucket import find_source
    from pipeline.inference.image_list import check_arguments as check_images

    args.checkpoint = find_source(args.checkpoint, args.step)
    check_images(args.images)


def write(args: argparse.Namespace, rows: RankRows, names: Names, count: int, width: int) -> Tally:
    """Write the file, or print a table, and report what was counted, all on rank 0; elsewhere the tally is of zeros. Collective."""
    from pipeline.inference.prediction import Tally
    from pipeline.inference.prediction_table import write_features, write_rows

    tally = Tally()

    def put(rows: Merged) -> None:
        merged = tally.watch(rows)
        if not args.output:
            print_table(merged, names)
        elif args.features:
            write_features(args.output, merged, names, count, width)
        else:
            write_rows(args.output, merged, names)
        report(args, tally, len(names.shown))

    rows.publish(put)
    return tally


def print_table(merged: Merged, names: Names) -> None:
    """Print the first rows: a line per image, its classes with their probabilities."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name that is not UTF-8, or a terminal that is not
        sys.stdout.reconfigure(errors="backslashreplace")
    total = 0
    for rows, errors in merged:
        for row, error in zip(rows[: max(0, _SHOWN - total)], errors):
            best = zip(row["top"].tolist(), row["probability"].tolist())
            text = f"error: {error}" if error else "  ".join(f"{names.shown[label]} {part:.1%}" for label, part in best)
            print(fitted(f"{names.file(int(row['index']))}  {text}", sys.stdout))
        total += len(rows)
    if total > _SHOWN:
        print(f"... and {total - _SHOWN} more: --output FILE.csv has all")


def report(args: argparse.Namespace, tally: Tally, classes: int) -> None:
    """Report what was counted, on stderr, where it is not in the way of a table."""
    if args.by_folder and tally.count:
        for name, correct in (("top-1", tally.correct1), ("top-5", tally.correct5)):
            if name == "top-1" or args.top >= 5 and tells_top5(classes):
                share = paint(f"{100 * correct / tally.count:6.2f} %", "green", sys.stdout)
                print(f"{name}  {share}   {correct:,} of {tally.count:,} right")
    where = f" in {args.output}" if args.output else ""
    print(f"{counted(tally.count, 'image')}{where}, {tally.errors:,} with an error", file=sys.stderr)


if __name__ == "__main__":
    run_command(main)
