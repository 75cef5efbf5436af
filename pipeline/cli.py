"""The command of :mod:`pipeline.train` until the training begins: each thing is imported when it is needed, the slowest last."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from pipeline.command_line import command_parser
from pipeline.errors import run_command

_TRAIN = """Train a model, or go on with a run that was stopped: the same command, on any number of processes.

  python -m pipeline.train --config pervit_t data.path=SHARD_DIR output_dir=runs/pervit_t
  bash launch/local.sh 8 -- pipeline.train --config pervit_t model.switches.conv_stem=false output_dir=runs/no_stem

The first is one process; the second is one for each of a machine's 8 GPUs; on a cluster: sbatch launch/train.slurm configs/pervit_t.yaml.
The folder launch/ is in the repository, not in an installed package.
"""
_KEYS = """python -m pipeline.config lists all keys with their defaults; python -m pipeline.models lists the models, and with a
model's name its switches. SIGTERM, SIGUSR1 or SIGHUP to any of the processes: all save what they have trained and end with exit
code 75."""


def train_main() -> int:
    """Read the command line and the config, then import the training and run it; returns the exit code."""
    parser = command_parser("pipeline.train", _TRAIN, _KEYS)
    parser.add_argument("--config", required=True, type=Path, help="a file, or a name of those that come along: pervit_t")
    parser.add_argument("overrides", nargs="*", metavar="dotted.key=value", help="for example train.epochs=100")
    args = parser.parse_args()

    from pipeline.faults.stop_signal import StopSignal

    with StopSignal() as stop:  # from the beginning: to start takes a while
        from pipeline.config import load_config
        from pipeline.logs import console
        from pipeline.models.registry import check_name

        console.outlive_the_terminal()
        config = load_config(args.config, args.overrides)
        check_name(config.model.name)
        if console.is_first_process():
            console.say(f"{config.model.name} into {config.output_dir}: loading PyTorch, DeepSpeed and DALI")
        from pipeline.train import connect_and_train

        return connect_and_train(config, stop)


def train_command() -> NoReturn:
    """``python -m pipeline.train``."""
    run_command(train_main)
