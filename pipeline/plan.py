"""Say before a run is submitted what it will take: memory per GPU, and what to change where it does not fit; time, cost and storage.

  python -m pipeline.plan --config pervit_m --nodes 2 --gpus-per-node 8 --gpu a100-80g --micro-batch 64
  python -m pipeline.plan --config pervit_t train.zero_stage=2 --nodes 1 --gpus-per-node 4 --data SHARD_DIR --json FILE

Nothing large is built: the model's step is traced with tensors that have shapes and no values, so a laptop without a GPU will do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pipeline import hardware
from pipeline.command_line import command_parser, run_command
from pipeline.errors import UserError
from pipeline.files import check_writable
from pipeline.planning.time_arguments import add_time_arguments, options_of, time_of
from pipeline.stores.place import place_argument

if TYPE_CHECKING:
    import argparse

    from pipeline.planning.measured import Measured
    from pipeline.planning.subject import Subject

_EPILOG = """The exit code is 0 if the run fits into the GPUs' memory, 1 if it does not. The configs of configs/ are known by their names."""
CPU = "cpu"  # --gpu for processes without one


def subject_of(args: argparse.Namespace) -> Subject:
    """What the command line asks about.

    Raises:
        UserError: an argument or the config is wrong.
    """
    for name in ("nodes", "gpus_per_node"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}, 1 or more needed", "correct it")
    gpu = None if args.gpu == CPU else hardware.gpu_named(args.gpu)
    from pipeline.config import load_config
    from pipeline.models.registry import check_name
    from pipeline.planning.subject import Subject

    overrides = list(args.overrides)
    if args.micro_batch is not None:
        if said := [each for each in overrides if each.startswith("train.micro_batch_size=")]:
            raise UserError(f"--micro-batch {args.micro_batch} and {said[-1]} are both there, one needed", "take one out")
        overrides.append(f"train.micro_batch_size={args.micro_batch}")
    config = load_config(args.config, overrides)
    check_name(config.model.name)
    return Subject(config, args.nodes, args.gpus_per_node, gpu)


def earlier_run(given: Path | None, subject: Subject, precision: str) -> tuple[Measured | None, str | None]:
    """The run whose steps replace the model of time: ``--measured``, else what lies in the run's own folder.

    Returns:
        None where there is none that fits; and why the one in the run's own folder does not.

    Raises:
        UserError: the one of ``--measured`` does not fit, or has too few steps.
    """
    from pipeline.planning.measured import difference, read_measured
    from pipeline.runs.folder import is_run

    path = given or Path(subject.config.output_dir)
    if given is None and not is_run(path):
        return None, None
    try:
        measured = read_measured(path)
    except UserError as error:
        if given:
            raise
        return None, str(error)
    why = difference(measured, subject, precision)
    if why and given:
        raise UserError(f"--measured {path} is no measure of this plan, {why}", "pass another run, or leave it out")
    return (None, f"{path} is no measure of this plan: {why}.") if why else (measured, None)


def main() -> int:
    """Print the page; returns 0 if the run fits into memory, else 1."""
    parser = command_parser("pipeline.plan", __doc__, _EPILOG)
    parser.add_argument("--config", required=True, type=Path, help="a file, or the name of a shipped config: pervit_t")
    parser.add_argument(
        "overrides", nargs="*", metavar="dotted.key=value", help="for example train.activation_checkpointing=true"
    )
    parser.add_argument("--nodes", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--gpus-per-node", type=int, default=1, help="one process for each; default: %(default)s")
    parser.add_argument(
        "--gpu", default=hardware.DEFAULT_GPU, help=f"{', '.join(hardware.GPUS)}, or {CPU}; default: %(default)s"
    )
    parser.add_argument(
        "--micro-batch", type=int, metavar="N", help="images per forward pass and GPU, in place of the config's"
    )
    parser.add_argument(
        "--data",
        type=place_argument,
        metavar="SHARDS",
        help="shard set, a folder or a URL, on which the loader's need is measured",
    )
    add_time_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    args = parser.parse_intermixed_args()
    subject, options = subject_of(args), options_of(args)
    if args.json:
        check_writable(args.json)

    from pipeline.planning import page
    from pipeline.planning.memory import plan_memory, precision_of, settled
    from pipeline.planning.schedule import count_images

    subject = settled(subject)
    # First what may be wrong with the arguments, which takes no time.
    measured, passed_over = earlier_run(args.measured, subject, precision_of(subject))
    if options.data:
        count_images(subject.config, options.data)
    memory = plan_memory(subject)
    time = time_of(subject, memory.precision, memory.stage, options, measured)
    print(page.text(subject, memory, time, passed_over))
    if args.json:
        args.json.write_text(json.dumps(page.figures(subject, memory, time), indent=1) + "\n")
    return 0 if memory.fits else 1


def command() -> NoReturn:
    """``python -m pipeline.plan``."""
    run_command(main, resumes=False)


if __name__ == "__main__":
    command()
