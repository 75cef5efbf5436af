"""Train a model, or resume a run that was stopped: the same command, on any number of processes.

  pervit train --config pervit_t data.path=SHARD_DIR output_dir=runs/pervit_t
  bash launch/local.sh 8 -- pipeline.train --config pervit_t model.switches.conv_stem=false output_dir=runs/no_stem
  pervit train --config pervit_t data.path=SHARD_DIR --dry-run

The first runs one process, the second one per GPU of a machine with 8, the third checks whether a start would succeed. On a cluster: sbatch launch/train.slurm pervit_t
The folder launch/ is in the repository, not in an installed package.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path

from pipeline.command_line import run_command

_KEYS = """pervit config lists all keys with their defaults; pervit models lists the models, and with a
model's name its switches. SIGTERM, SIGUSR1 or SIGHUP to any process: all save what they have trained and exit with code 75."""


def main() -> int:
    """Parse the command line, load the config, train; returns the exit code.

    All that can be is validated before the slow import of PyTorch and DeepSpeed.
    """
    from pipeline.config.options import override_parser

    parser = override_parser("pipeline.train", __doc__, _KEYS)
    parser.add_argument("--config", required=True, type=Path, help="a file, or the name of a shipped config: pervit_t")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything and take one step on random images with the real model, without writing or changing a file",
    )
    args = parser.parse_intermixed_args()

    from pipeline.cluster.environment import StopSignal, has_agent

    # From the beginning: starting takes a while. A dry run has nothing to save, and ends at once; so does a rank that waits for
    # others to connect when torchrun, which sends SIGTERM after the first failure, has lost one of them.
    stop = StopSignal()
    with nullcontext() if args.dry_run or has_agent() else stop:
        from pipeline.config import load_config, load_recipe
        from pipeline.logs import console
        from pipeline.models.registry import check_name
        from pipeline.training.paths import check_paths

        console.outlive_the_terminal()
        console.install()
        config = load_config(args.config, args.overrides)
        check_name(config.model.name)
        check_paths(config, args.dry_run)
        if console.is_first_process():
            start = "a dry run of " if args.dry_run else ""
            console.say(f"{start}{config.model.name} into {config.output_dir}: loading PyTorch, DeepSpeed and DALI")
        with console.stage("loading the libraries"):
            from pipeline.training.loop import connect_and_train

        return connect_and_train(config, stop, load_recipe(args.config), args.dry_run)


command = partial(run_command, main)

if __name__ == "__main__":
    command()
