"""Measure what a trained model's features are worth: frozen, with nearest neighbours, a linear classifier and few images of a class.

    pervit probe runs/pervit_t --data data/imagenet
    pervit probe pervit_t.safetensors --data data/flowers --few-shot 1 2 5 --json probe.json

Features are what the classifier sees. --data has the splits train and val, of any classes: those that the model was trained on or others.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from pipeline.command_line import begins_anew, command_parser, interrupted_later, run_command
from pipeline.files import check_writable, write_json
from pipeline.inference.session import SOURCES, add_model_options, open_session, read_asked
from pipeline.stores.place import place_argument
from pipeline.terminal import fitted


@begins_anew
def main() -> None:
    parser = command_parser("pipeline.probe", __doc__)
    add = parser.add_argument
    add("checkpoint", type=place_argument, metavar="CHECKPOINT", help=SOURCES)
    add("--data", required=True, type=place_argument, metavar="DIR", help="shards, or SPLIT/CLASS/*.JPEG, with train and val")
    add("--few-shot", type=int, nargs="*", default=[1, 5, 10], metavar="N", help="images per class (default: 1 5 10)")
    add("--c", type=float, help="of the linear classifier (default: the best of 45 on a tenth of train)")
    add_model_options(parser)
    add("--json", type=Path, metavar="FILE", help="also write the result to this file, in a folder that all processes share")
    run(parser.parse_args())


def run(args: argparse.Namespace) -> None:
    """Run the command. Collective."""
    from pipeline.checkpoint.bucket import find_source
    from pipeline.logs.console import stage
    from pipeline.shards.image_folder import check_data, open_split

    check_writable(args.json)
    args.checkpoint = find_source(args.checkpoint, args.step)
    check_data(args.data)
    with stage("loading the libraries"), interrupted_later():
        from pipeline.cluster.rendezvous import disconnect
        from pipeline.inference.evaluation import check_same_classes
        from pipeline.inference.probing import accuracies, collect_features
        from pipeline.step.precision import autocast
    with stage(f"reading {args.checkpoint}"):
        trained, config = read_asked(args)
        model = trained.build_model()
    with stage(f"listing {args.data}"):
        train = open_split(args.data, "train", None)
        val = open_split(args.data, "val", train.classes)
        check_same_classes(val, train.classes, of="its train split")
    world, precision = open_session(model, config.train.precision, args)
    forward, width = autocast(world.device, precision.name)(model.pooled), model.pooled_width
    with tempfile.TemporaryDirectory() as scratch:
        beside = args.json or Path(world.from_main(scratch), "features")
        of_train, of_val = (collect_features(forward, width, each, config, world, beside) for each in (train, val))
    disconnect()  # the other ranks end here
    if not of_train or not of_val:
        return
    percent, c = accuracies(of_train, of_val, len(train.classes), args.few_shot, args.c)
    about = {"model": config.model.name, "checkpoint": str(args.checkpoint), "step": trained.step, "weights": trained.kind}
    about |= {"precision": precision.name, "width": width, "data": str(args.data), "classes": len(train.classes)}
    row = {**about, "train_images": len(of_train), "val_images": len(of_val), "c": c, "accuracy": percent}
    lines = [
        f"features   {width} of {config.model.name}, {trained.kind} weights of step {trained.step}",
        f"images     {len(of_val):,} of val by {len(of_train):,} of train, {len(train.classes)} classes, {args.data}",
    ]
    for name, tries in percent.items():
        spread = f"± {statistics.stdev(tries):.2f} in {len(tries)} tries" if len(tries) > 1 else ""
        lines.append(f"{name:<11}{statistics.mean(tries):6.2f} %   {f'C = {c:.3g}' if name == 'linear' else spread}".rstrip())
    print(fitted("\n".join(lines), sys.stdout))
    write_json(args.json, row)


if __name__ == "__main__":
    run_command(main)
