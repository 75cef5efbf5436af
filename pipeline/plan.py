"""Estimate what a run will take before it is submitted: memory per GPU, and what to change if it does not fit; time, cost and storage.

  pervit plan --config pervit_m --nodes 2 --gpus-per-node 8 --gpu a100-80g --micro-batch 64
  pervit plan --config pervit_t train.zero_stage=2 --nodes 1 --gpus-per-node 4 --data SHARD_DIR --json FILE

Nothing large is built: the model's step is traced with tensors that have shapes and no values, so a laptop without a GPU will do.
"""

import argparse
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import hardware
from pipeline.command_line import begins_anew, run_command
from pipeline.errors import UserError
from pipeline.files import check_writable, write_json
from pipeline.shards.shard_set import check_shards
from pipeline.stores.place import place_argument
from pipeline.terminal import Stage, fitted

if TYPE_CHECKING:
    from pipeline.planning.measured import Measured
    from pipeline.planning.memory import Subject

_EPILOG = """The exit code is 0 if the run fits into the GPUs' memory, 1 if it does not. The configs of configs/ are known by their names."""
CPU = "cpu"  # --gpu for processes without one


def subject_of(args: argparse.Namespace) -> "Subject":
    """What the command line asks about."""
    for option, count in {"--nodes": args.nodes, "--gpus-per-node": args.gpus_per_node, "--cpus": args.cpus}.items():
        if count is not None and count < 1:
            raise UserError(f"{option} must be at least 1, got {count}", "correct it")
    gpu = None if args.gpu == CPU else hardware.gpu_named(args.gpu)
    from pipeline.config import load_config
    from pipeline.models.registry import check_name

    overrides = list(args.overrides)
    if args.micro_batch is not None:
        if said := [override for override in overrides if override.startswith("train.micro_batch_size=")]:
            problem = f"--micro-batch cannot stand beside {said[-1]}, got --micro-batch {args.micro_batch}"
            raise UserError(problem, "remove one of them")
        overrides.append(f"train.micro_batch_size={args.micro_batch}")
    config = load_config(args.config, overrides)
    check_name(config.model.name)

    with Stage("loading PyTorch"):
        from pipeline.planning.memory import Subject

    return Subject(config, args.nodes, args.gpus_per_node, gpu)


def earlier_run(given: Path | None, subject: "Subject", record: Path | None = None) -> "tuple[Measured | None, str | None]":
    """What replaces the model of time: ``--measured``, ``--gpu-record``, else the run that lies in the run's own folder.
    Returns None where none fits, which is an error of ``--measured``; and why the one in the run's own folder does not."""
    from pipeline.planning.measured import difference, read_measured, read_record
    from pipeline.runs.folder import is_run

    if record and given:
        raise UserError(f"--gpu-record cannot stand beside --measured {given}, got {record}", "remove one of them")
    if record:
        return read_record(record, subject), None
    path = given or subject.config.folder
    if given is None and not is_run(path):
        return None, None
    try:
        measured = read_measured(path)
    except UserError as error:
        if given:
            raise
        return None, f"{path} does not measure this plan: {error.problem}."
    why = difference(measured, subject)
    if why and given:
        raise UserError(f"--measured must be a run like this plan, got {path}: {why}", "pass another run, or leave it out")
    return (None, f"{path} does not measure this plan: {why}.") if why else (measured, None)


@begins_anew
def main() -> int:
    """Print the page; returns 0 if the run fits into memory, else 1."""
    from pipeline.config.loading import override_parser

    parser = override_parser("pipeline.plan", __doc__, _EPILOG, "train.activation_checkpointing=true")
    add = parser.add_argument
    add("--config", required=True, type=Path, help="a file, or the name of a shipped config: pervit_t")
    add("--nodes", type=int, default=1, help="default: %(default)s")
    add("--gpus-per-node", type=int, default=1, help="one process for each; default: %(default)s")
    add("--gpu", default=hardware.DEFAULT_GPU, help=f"{', '.join(hardware.GPUS)}, or {CPU}; default: %(default)s")
    add("--micro-batch", type=int, metavar="N", help="images per forward pass and GPU, instead of the config's")
    cores = f"CPU cores of a node, which bound the loader; default: with --gpu {CPU} this machine's, else not known"
    add("--cpus", type=int, metavar="N", help=cores)
    add("--data", type=place_argument, metavar="SHARDS", help="measure the loader on this shard set, a folder or a URL")
    add("--time-limit", metavar="TIME", help="of each Slurm job, as sbatch takes it: 24:00:00 or 3-00:00:00")
    add("--price", type=float, metavar="P", help="price of one GPU for an hour, in any currency")
    network = "bandwidth of a node to the others, all ports together; default: %(default)g, a port of 200 Gbit/s"
    add("--network", type=float, default=hardware.NETWORK / 1e9, metavar="GB/s", help=network)
    measured = "run folder whose measured steps replace the estimate; default: output_dir, if it holds a comparable run"
    add("--measured", type=Path, metavar="RUN", help=measured)
    record = "measured steps of the GPU, by make gpu-check: the most similar one scales the estimate"
    add("--gpu-record", type=Path, metavar="FILE", help=record)
    add("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    args = parser.parse_intermixed_args()
    if args.price is not None and not (math.isfinite(args.price) and args.price >= 0):
        raise UserError(f"--price must be at least 0, got {args.price:g}", "correct it")
    if not (math.isfinite(args.network) and args.network > 0):
        raise UserError(f"--network must be positive, in GB/s, got {args.network:g}", "25 is a port of 200 Gbit/s")
    check_writable(args.json)
    if args.data:
        if isinstance(args.data, Path) and not args.data.is_dir():
            problem = f"--data must be a shard set, got {args.data}, which is not a directory"
            raise UserError(problem, "pass the folder that data_prep.shard_imagenet wrote")
        check_shards(args.data)
    subject = subject_of(args)

    with Stage("loading PyTorch and DeepSpeed"):
        from pipeline.planning import page
        from pipeline.planning.length import count_images, known_loader, measure_loader, parse_time_limit
        from pipeline.planning.memory import plan_memory, settled
        from pipeline.planning.time import Time, rates_of

    limit = None if args.time_limit is None else parse_time_limit(args.time_limit)
    subject = settled(subject)
    # First what may be wrong with the arguments, which takes no time.
    run, passed_over = earlier_run(args.measured, subject, args.gpu_record)
    images = count_images(subject.config, args.data)
    with Stage(f"tracing a step of {subject.config.model.name}"):
        memory = plan_memory(subject)
    with Stage("measuring how fast images are read"):
        loader = measure_loader(subject.config, args.data) if args.data else known_loader(subject.config)
    cpus = args.cpus or (None if subject.gpu else len(os.sched_getaffinity(0)))
    with Stage("estimating time"):
        time = Time(subject, rates_of(subject), images, 1e9 * args.network, limit, args.price, loader, cpus, run)
    with Stage("looking for what fits better"):
        text = page.text(subject, memory, time, passed_over)
    print(fitted(text, sys.stdout))
    write_json(args.json, page.figures(subject, memory, time))
    return 0 if memory.fits else 1


if __name__ == "__main__":
    run_command(main)
