"""Evaluate a trained model: every image counts once, for any number of processes and any batch size.

    pervit evaluate --checkpoint runs/pervit_t --data data/imagenet --json result.json
    pervit evaluate pervit_t.onnx --data folder/of/images --batch-size 64
    pervit evaluate --checkpoint runs/pervit_t --data data/imagenet --predictions predictions.parquet
    pervit evaluate --checkpoint runs/pervit_t --data data/imagenet --set real=real.json --set v2=data/v2 --set a=data/imagenet-a

--set adds a set of ImageNet's classes to the table: real (the published real.json, for the images of --data), v2, a, r or sketch (the
folder as published, or shards of it). If the run kept an average of its weights (train.ema_decay), the average is evaluated unless
--weights says otherwise.
"""

import argparse
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from pipeline.command_line import begins_anew, command_parser, interrupted_later, run_command
from pipeline.errors import UserError
from pipeline.files import check_writable, write_json
from pipeline.inference.session import SOURCES, add_model_options, open_session, read_asked, warn
from pipeline.metrics import tells_top5
from pipeline.stores.place import place_argument
from pipeline.terminal import fitted, paint


@begins_anew
def main() -> None:
    parser = command_parser("pipeline.evaluate", __doc__)
    add = parser.add_argument
    where = "folder or URL with shards, or folder with images: CLASS/*.JPEG or SPLIT/CLASS/*.JPEG"
    switch = "override a switch of the model, such as ConViT's attention masks; repeatable"
    others = "another set: real, v2, a, r or sketch; see above; repeatable"
    few = "a file with one name per line, or names with commas between: only these classes count, and only their images"
    rows = "also write a row for each image, to a .csv, .jsonl or .parquet file in a folder that all processes share"
    checkpoint = parser.add_mutually_exclusive_group(required=True)
    checkpoint.add_argument("checkpoint", nargs="?", default=argparse.SUPPRESS, metavar="PATH", help=SOURCES)
    checkpoint.add_argument("--checkpoint", metavar="PATH", help="the same")
    add("--data", type=place_argument, metavar="DIR", help=where)
    add("--set", action="append", default=[], metavar="NAME=PLACE", help=others)
    add("--classes", metavar="FILE|NAMES", help=few)
    add("--split", default="val", help="default: val")
    add_model_options(parser)
    add("--switch", action="append", default=[], metavar="NAME=VALUE", help=switch)
    add("--json", type=Path, metavar="FILE", help="also write the result to this file")
    add("--predictions", type=Path, metavar="FILE", help=rows)
    args = parser.parse_args()
    # No type above: argparse would take a positional that is left out for one.
    args.checkpoint = place_argument(args.checkpoint)
    run(args)


def run(args: argparse.Namespace) -> None:
    """Run the command. Collective."""
    from pipeline.checkpoint.bucket import find_source
    from pipeline.inference.prediction_table import Names, check_file, prediction_dtype, write_rows
    from pipeline.inference.sets import REAL, parse_sets
    from pipeline.logs import console
    from pipeline.shards.image_folder import check_data, open_split

    check_writable(args.json)
    if args.predictions:
        check_file("--predictions", args.predictions)
    places = ({"": args.data} if args.data else {}) | parse_sets(args.set)
    if not args.data and (REAL in places or not places):
        needs = " with --set real" if REAL in places else ""
        raise UserError(f"--data is required{needs}", "add --data with the validation set")
    if args.predictions and len(places) > 1:
        raise UserError(f"--predictions is for one set, got {len(places)}", "evaluate that set alone")
    args.checkpoint = find_source(args.checkpoint, args.step)
    if args.data:
        check_data(args.data)

    with console.stage("loading the libraries"), interrupted_later():
        from pipeline.cluster.rendezvous import disconnect
        from pipeline.config.values import parse_switches
        from pipeline.inference.evaluation import check_same_classes, evaluate, evaluation_loader
        from pipeline.inference.prediction import RankRows, collect_evaluated
        from pipeline.inference.sets import open_set, read_classes
        from pipeline.step.precision import autocast

    with console.stage(f"reading {args.checkpoint}"):
        trained, config = read_asked(args)
    given = {**config.model.arguments, **parse_switches(args.switch)}
    config = config.with_values({"model.switches": given, "model.options": {}})
    classes, shown, val = trained.classes, trained.shown, None
    if args.data:
        with console.stage(f"listing {args.data}"):
            val = open_split(args.data, args.split, classes if trained.named else None)
        if trained.named:
            check_same_classes(val, classes, of=str(args.checkpoint))
        elif len(val.classes) != len(classes):
            problem = f"{args.checkpoint} has {len(classes)} classes, but the images have {len(val.classes)}"
            raise UserError(problem, "pass images of the data set that it was trained on")
        else:
            warn(f"{args.checkpoint} does not name its classes: they are taken to be those of the images, in the same order")
            classes, shown = val.classes, val.class_names
    elif not trained.named:
        remedy = "add --data with the validation set, whose classes are taken to be the model's in the same order"
        raise UserError(f"{args.checkpoint} does not name its classes, so that folders cannot be matched with them", remedy)
    kept = read_classes(args.classes, classes, shown) if args.classes else None
    with console.stage("listing the images"):
        sets = [open_set(name, place, args.split, classes, val, kept) for name, place in places.items()]

    try:
        with console.stage(f"building {config.model.name}"):
            model = trained.build_model(config.model.switches)
    except RuntimeError:  # PyTorch's list of parameter names would not help
        problem = f"{args.checkpoint} has other parameters than {config.model.name} with the switches {config.model.switches}"
        raise UserError(problem, "leave out each --switch that adds, removes or reshapes parameters") from None
    world, precision = open_session(model, config.train.precision, args)
    in_precision = autocast(world.device, precision.name)
    rows_of_sets = []
    for each in sets:
        images = each.images
        with console.stage("opening the loader"):
            loader = evaluation_loader(images, config, world)
        dtype = prediction_dtype(min(5, len(images.classes)), labelled=True)
        with RankRows(args.predictions, dtype, loader.batches, world) if args.predictions else nullcontext() as rows:
            consumer = collect_evaluated(rows) if rows else None
            forward = in_precision(each.scores(model, world.device))
            result = evaluate(forward, loader, world, consumer=consumer, truth=each.truth)
            assert result is not None  # nothing gives the pass up
            loader.close()
            if "nonfinite" in result:
                lost = f"{result['nonfinite']} of {result['count']} images in {precision.name}"
                problem = f"{args.checkpoint} gives scores that are not finite for {lost}, so it has no accuracy"
                other = "" if precision.name == "fp32" else "try --precision fp32, or "
                raise UserError(problem, f"{other}take a checkpoint of an earlier --step")
            if rows:
                names = Names(images.key, images.classes, [shown[output] for output in each.outputs])
                with console.stage(f"writing {args.predictions}"):
                    rows.publish(partial(write_rows, args.predictions, names=names, labelled=True))
        if each.truth is not None:  # several labels have no cross entropy, and no class of their own
            result |= dict.fromkeys(("loss", "class_correct", "class_count"))
        row = {
            "model": config.model.name,
            "checkpoint": str(args.checkpoint),
            "step": trained.step,
            "set": each.title,
            "data": str(images.folder),
            "split": images.split,
            "weights": trained.kind,
            "precision": precision.name,
            "switches": config.model.switches,
            "classes": len(images.classes),
            **result,
            "left_out": len(images) - result["count"],
        }
        rows_of_sets.append(row)
    if world.is_main:
        print(fitted(table(rows_of_sets, precision.reason), sys.stdout))
        write_json(args.json, rows_of_sets if args.set else rows_of_sets[0])
    disconnect()


def table(rows: list[dict], why_precision: str) -> str:
    """The results as text: model, then the figures of each set."""
    first = rows[0]
    switches = ", ".join(f"{name}={value}" for name, value in first["switches"].items())
    lines = {
        "model": first["model"] + (f" ({switches})" if switches else ""),
        "weights": f"{first['weights']}, step {first['step']} of {first['checkpoint']}",
        "precision": f"{first['precision']}, {why_precision}",
    }
    text = [*(f"{name:<11}{value}" for name, value in lines.items()), "    top-1     top-5      loss   images"]
    for row in rows:
        top1 = paint(f"{row['top1']:7.2f} %", "green", sys.stdout)
        top5 = f"{row['top5']:7.2f} %" if tells_top5(row["classes"]) else " " * 9
        loss = "" if row["loss"] is None else f"{row['loss']:.4f}"
        left_out = f", {row['left_out']} left out" if row["left_out"] else ""
        text.append(f"{top1} {top5} {loss:>9} {row['count']:>8,} of {row['set']}{left_out}")
    return "\n".join(text)


if __name__ == "__main__":
    run_command(main)
