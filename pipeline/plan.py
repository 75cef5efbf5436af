"""Say before a run is submitted what it will take: memory per GPU, and what to change where it does not fit; time, cost and storage.

  python -m pipeline.plan --config pervit_m --nodes 2 --gpus-per-node 8 --gpu a100-80g
  python -m pipeline.plan --config pervit_t train.zero_stage=2 --nodes 1 --gpus-per-node 4 --data SHARD_DIR --json FILE

Nothing large is built: the model's step is traced with tensors that have shapes and no values, so a laptop without a GPU will do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pipeline.command_line import command_parser, run_command
from pipeline.errors import UserError
from pipeline.files import check_writable
from pipeline.planning import gpus

if TYPE_CHECKING:
    import argparse

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
    gpu = None if args.gpu == CPU else gpus.gpu_named(args.gpu)
    from pipeline.config import load_config
    from pipeline.models.registry import check_name
    from pipeline.planning.subject import Subject

    overrides = list(args.overrides)
    if args.micro_batch is not None:
        overrides.append(f"train.micro_batch_size={args.micro_batch}")
    config = load_config(args.config, overrides)
    check_name(config.model.name)
    return Subject(config, args.nodes, args.gpus_per_node, gpu)


def main() -> int:
    """Print the page; returns 0 if the run fits into memory, else 1."""
    parser = command_parser("pipeline.plan", __doc__, _EPILOG)
    parser.add_argument("--config", required=True, type=Path, help="a file, or the name of a shipped config: pervit_t")
    parser.add_argument(
        "overrides", nargs="*", metavar="dotted.key=value", help="for example train.activation_checkpointing=true"
    )
    parser.add_argument("--nodes", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--gpus-per-node", type=int, default=1, help="one process for each; default: %(default)s")
    parser.add_argument("--gpu", default=gpus.DEFAULT, help=f"{', '.join(gpus.GPUS)}, or {CPU}; default: %(default)s")
    parser.add_argument(
        "--micro-batch", type=int, metavar="N", help="images per forward pass and GPU, in place of the config's"
    )
    parser.add_argument("--data", type=Path, metavar="SHARDS", help="shard set on which the loader's need is measured")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    args = parser.parse_intermixed_args()
    subject = subject_of(args)
    if args.json:
        check_writable(args.json)

    from pipeline.planning import page
    from pipeline.planning.memory import plan_memory

    memory = plan_memory(subject)
    print(page.text(subject, memory))
    if args.json:
        args.json.write_text(json.dumps(page.figures(subject, memory), indent=1) + "\n")
    return 0 if memory.fits else 1


def command() -> NoReturn:
    """``python -m pipeline.plan``."""
    run_command(main, resumes=False)


if __name__ == "__main__":
    command()
