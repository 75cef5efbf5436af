"""The arguments of the time's plan on a command line, and the plan that they ask for. PyTorch is imported when it is made."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import UserError
from pipeline.planning.network import NETWORK
from pipeline.planning.subject import Subject

if TYPE_CHECKING:
    from pipeline.planning.measured import Measured
    from pipeline.planning.schedule import Options
    from pipeline.planning.time import Time


def add_time_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --time-limit, --price, --network and --measured."""
    parser.add_argument("--time-limit", metavar="TIME", help="of a Slurm job, as sbatch takes it: 24:00:00 or 3-00:00:00")
    parser.add_argument("--price", type=float, metavar="P", help="of an hour of a GPU, in any currency")
    parser.add_argument(
        "--network",
        type=float,
        default=NETWORK / 1e9,
        metavar="GB/s",
        help="of a node to the others, all of its ports together; default: %(default)g, a port of 200 Gbit/s",
    )
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="RUN",
        help="run folder whose steps replace the model of time; default: output_dir, if a run is there that fits",
    )


def options_of(args: argparse.Namespace) -> Options:
    """The options of a command line, which also has ``data``.

    Raises:
        UserError: one of them is out of range.
    """
    from pipeline.planning.schedule import Options, parse_time_limit

    if args.price is not None and not (math.isfinite(args.price) and args.price >= 0):
        raise UserError(f"--price is {args.price:g}, a price of 0 or more needed", "correct it")
    if not (math.isfinite(args.network) and args.network > 0):
        raise UserError(f"--network is {args.network:g}, GB/s above 0 needed", "25 is a port of 200 Gbit/s")
    limit = None if args.time_limit is None else parse_time_limit(args.time_limit)
    return Options(limit, args.price, 1e9 * args.network, args.data)


def time_of(subject: Subject, precision: str, stage: int, options: Options, measured: Measured | None = None) -> Time:
    """Plan the time of a run, with what has to be measured here: the CPU's rates for a run on CPUs, the loader with ``options.data``.

    Args:
        subject: the run.
        precision: "bf16" or "fp32".
        stage: of ZeRO, 0 on one process.
        options: of the command line.
        measured: an earlier run.

    Raises:
        UserError: the shards cannot be read, or the run cannot be planned.
    """
    import torch

    from pipeline.planning.loader_need import measure_loader
    from pipeline.planning.machine import measure_cpu
    from pipeline.planning.roofline import GpuRates, Rates
    from pipeline.planning.schedule import count_images
    from pipeline.planning.time import plan_time

    images = count_images(subject.config, options.data)
    rates: Rates
    if subject.gpu:
        rates = GpuRates(subject.gpu)
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // subject.gpus_per_node))  # a process's share of the cores
        rates = measure_cpu(precision)
    loader = measure_loader(subject.config, options.data) if options.data else None
    return plan_time(subject, precision, stage, rates, images, options, loader, measured)
