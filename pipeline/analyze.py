"""Make the papers' figures of what a model has learned: attention maps, where heads look, how much position and content count.

    pervit analyze runs/pervit_t --data data/imagenet --output analysis/pervit_t
    pervit analyze deit_s --data folder/of/images --images 100 --only attention_distance --output analysis/deit_s
    pervit analyze runs/pervit_t runs/deit_t runs/pervit_table2_deit_t_irpe --data data/imagenet --output analysis/compared

Writes index.html, a page with all figures; the figures as PNG and SVG; and analysis.json with the numbers. Without --data,
only the figures of the weights are made. A model's name stands for fresh weights. Several models have a folder each, and a page that
shows them in one plot.
"""

import argparse
from pathlib import Path

from pipeline.checkpoint.folder import is_path, parse_step
from pipeline.command_line import begins_anew, command_parser, interrupted_later, run_command
from pipeline.errors import UserError
from pipeline.stores.place import place_argument


@begins_anew
def main() -> None:
    parser = command_parser("pipeline.analyze", __doc__)
    add = parser.add_argument
    source = "a run folder, one of its checkpoints, an exported file, or a model's name; or several"
    add("checkpoints", nargs="+", metavar="CHECKPOINT", help=source)
    data = "folder or URL with shards, or folder with images: CLASS/*.JPEG or SPLIT/CLASS/*.JPEG"
    add("--data", type=place_argument, metavar="DIR", help=data)
    add("--split", default="val", help="default: val")
    add("--images", type=int, default=1024, metavar="N", help="images to average over, chosen at random (default: 1024)")
    add("--only", nargs="+", default=[], metavar="NAME", help="figures to make, by the names of their files (default: all)")
    query = "patch whose maps are shown, from 0, 16 x 16 pixels each (default: the centre)"
    add("--query", type=_query, metavar="ROW,COLUMN", help=query)
    add("--example", nargs="+", default=[], metavar="KEY", help="images to show with their maps, by their keys")
    add("--examples", type=int, default=4, metavar="N", help="images to show, chosen at random, without --example (default: 4)")
    add("--batch-size", type=int, default=16, help="images per process and forward pass (default: 16); no figure depends on it")
    add("--seed", type=int, default=0, help="for the choice of images and for fresh weights (default: 0)")
    add("--step", type=parse_step, help="which checkpoint: a number or best (default: the newest)")
    add("--output", required=True, type=Path, metavar="DIR", help="folder to write to; an earlier analysis there is replaced")
    run(parser.parse_args())


def _query(text: str) -> tuple[int, int]:
    try:
        row, column = text.split(",")
        return int(row), int(column)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ROW,COLUMN, such as 7,7") from None


def _check(args: argparse.Namespace) -> None:
    for name, least, most in (("images", 1, None), ("examples", 0, 64), ("batch_size", 1, 65536), ("seed", 0, 2**64 - 1)):
        value = getattr(args, name)
        if value < least or (most is not None and value > most):
            bound = f"at least {least}" if most is None or value < least else f"at most {most}"
            raise UserError(f"--{name.replace('_', '-')} must be {bound}, got {value}", "change it")
    if args.data is None and args.example:
        raise UserError("--example requires --data, which holds the images", "add --data")


def run(args: argparse.Namespace) -> None:
    """Run the command. Collective. Raises UserError: no such model, data, figure or image, or the output cannot be written."""
    _check(args)
    from pipeline.checkpoint.bucket import find_source
    from pipeline.logs import console
    from pipeline.shards.image_folder import check_data

    args.checkpoints = [str(find_source(each, args.step)) if is_path(each) else each for each in args.checkpoints]
    if args.data is not None:
        check_data(args.data)

    console.install()
    with console.stage("loading the libraries"), interrupted_later():
        from pipeline.analysis.session import Options, analyze, read_subject
        from pipeline.analysis.writing import prepare_output

        prepare_output(args.output)

    with console.stage(f"reading {', '.join(args.checkpoints)}"):
        subjects = [read_subject(checkpoint, args.step, args.seed) for checkpoint in args.checkpoints]
    options = {name: value for name, value in vars(args).items() if name not in ("checkpoints", "step")}
    analyze(subjects, Options(**options))


if __name__ == "__main__":
    run_command(main)
