"""Evaluate a trained model: every image counts once, for any number of processes and any batch size.

    pervit evaluate --checkpoint runs/pervit_t --data data/imagenet --json result.json
    pervit evaluate --checkpoint pervit_t.safetensors --data folder/of/images --batch-size 64
    pervit evaluate --checkpoint runs/pervit_t --data data/imagenet --predictions predictions.parquet

If the run kept an average of its weights (train.ema_decay), the average is evaluated unless --weights says otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from pipeline.command_line import command_parser, run_command
from pipeline.errors import UserError
from pipeline.files import check_writable
from pipeline.inference.session import SOURCES, add_model_options, open_session, read_asked, warn
from pipeline.metrics import tells_top5
from pipeline.stores.place import place_argument
from pipeline.terminal import fitted, paint


def main() -> None:
    parser = command_parser("pipeline.evaluate", __doc__)
    add = parser.add_argument
    where = "folder or URL with shards, or folder with images: CLASS/*.JPEG or SPLIT/CLASS/*.JPEG"
    switch = "override a switch of the model, such as ConViT's attention masks; repeatable"
    rows = "also write a row for each image, to a .csv, .jsonl or .parquet file in a folder that all processes share"
    add("--checkpoint", required=True, type=Path, metavar="PATH", help=SOURCES)
    add("--data", required=True, type=place_argument, metavar="DIR", help=where)
    add("--split", default="val", help="default: val")
    add_model_options(parser)
    add("--switch", action="append", default=[], metavar="NAME=VALUE", help=switch)
    add("--json", type=Path, metavar="FILE", help="also write the result to this file")
    add("--predictions", type=Path, metavar="FILE", help=rows)
    run(parser.parse_args())


def run(args: argparse.Namespace) -> None:
    """Run the command. Collective."""
    from pipeline.checkpoint.folder import check_source
    from pipeline.inference.prediction_table import Names, check_file, prediction_dtype, write_rows
    from pipeline.logs import console
    from pipeline.shards.image_folder import check_data, open_split

    if args.json:
        check_writable(args.json)
    if args.predictions:
        check_file("--predictions", args.predictions)
    check_source(args.checkpoint, args.step)
    check_data(args.data)

    # Imported only now: PyTorch takes seconds, and --help must not wait for it.
    with console.stage("loading the libraries"):
        from pipeline.cluster.rendezvous import disconnect
        from pipeline.config.values import parse_switches
        from pipeline.inference.evaluation import check_same_classes, evaluate, evaluation_loader
        from pipeline.inference.prediction import RankRows, collect_evaluated

    with console.stage(f"reading {args.checkpoint}"):
        trained, config = read_asked(args)
    given = {**config.model.arguments, **parse_switches(args.switch)}
    config = config.with_values({"model.switches": given, "model.options": {}})
    with console.stage(f"listing {args.data}"):
        images = open_split(args.data, args.split, trained.classes if trained.named else None)
    if trained.named:
        check_same_classes(images, trained.classes, of=str(args.checkpoint))
    elif len(images.classes) != len(trained.classes):
        raise UserError(
            f"{args.checkpoint} has {len(trained.classes)} classes, but the images have {len(images.classes)}",
            "pass images of the data set that it was trained on",
        )
    else:
        warn(f"{args.checkpoint} does not name its classes: they are taken to be those of the images, in the same order")

    try:
        with console.stage(f"building {config.model.name}"):
            model = trained.build_model(config.model.switches)
    except RuntimeError:  # PyTorch's list of parameter names would not help
        raise UserError(
            f"{args.checkpoint} has other parameters than {config.model.name} with the switches {config.model.switches}",
            "leave out each --switch that adds, removes or reshapes parameters",
        ) from None
    with console.stage("opening the loader"):
        session = open_session(model, config.train.precision, args)
        world, precision = session.world, session.precision
        loader = evaluation_loader(images, config, world)
    dtype = prediction_dtype(min(5, len(images.classes)), labelled=True)
    with RankRows(args.predictions, dtype, loader.batches, world) if args.predictions else nullcontext() as rows:
        result = evaluate(session.run(model), loader, world, consumer=collect_evaluated(rows) if rows else None)
        assert result is not None  # nothing gives the pass up
        loader.close()
        if "nonfinite" in result:
            raise UserError(
                f"{args.checkpoint} gives scores that are not finite for {result['nonfinite']} of {result['count']} images in {precision.name}, "
                f"so it has no accuracy",
                f"{'' if precision.name == 'fp32' else 'try --precision fp32, or '}take a checkpoint of an earlier --step",
            )
        if rows:
            names = Names(images.key, images.classes, trained.shown if trained.named else images.class_names)
            with console.stage(f"writing {args.predictions}"):
                rows.publish(lambda merged: write_rows(args.predictions, merged, names, labelled=True))
    if world.is_main:
        row = {
            "model": config.model.name,
            "checkpoint": str(args.checkpoint),
            "step": trained.step,
            "data": str(images.folder),
            "split": images.split,
            "weights": trained.kind,
            "precision": precision.name,
            "switches": config.model.switches,
            **result,
            "left_out": len(images) - result["count"],
        }
        print(fitted(table(row, precision.reason), sys.stdout))
        if args.json:
            args.json.write_text(json.dumps(row, indent=1) + "\n")
    disconnect()


def table(row: dict, why_precision: str) -> str:
    """The result as text: model and data, then the figures."""
    switches = ", ".join(f"{name}={value}" for name, value in row["switches"].items())
    left_out = f", {row['left_out']} left out" if row["left_out"] else ""
    split = f" ({row['split']})" if row["split"] else ""  # a plain folder has no split
    top1 = paint(f"{row['top1']:6.2f} %", "green", sys.stdout)
    top5 = {"top-5": f"{row['top5']:6.2f} %   {row['correct5']:,} right"} if tells_top5(len(row["class_count"])) else {}
    lines = {
        "model": row["model"] + (f" ({switches})" if switches else ""),
        "weights": f"{row['weights']}, step {row['step']} of {row['checkpoint']}",
        "precision": f"{row['precision']}, {why_precision}",
        "images": f"{row['count']:,} of {row['data']}{split}{left_out}",
        "top-1": f"{top1}   {row['correct1']:,} right",
        **top5,
        "loss": f"{row['loss']:8.4f}",
    }
    return "\n".join(f"{name:<11}{text}" for name, text in lines.items())


command = partial(run_command, main, resumes=False)

if __name__ == "__main__":
    command()
