"""Train a model, or resume a run that was stopped: the same command, on any number of processes.

  pervit train --config pervit_t data.path=SHARD_DIR output_dir=runs/pervit_t
  bash launch/local.sh 8 -- pipeline.train --config pervit_t model.switches.conv_stem=false output_dir=runs/no_stem
  pervit train --config pervit_t data.path=SHARD_DIR --dry-run

The first runs one process, the second one per GPU of a machine with 8, the third checks whether a start would succeed. On a cluster: sbatch launch/train.slurm pervit_t.
The folder launch/ is in the repository, not in an installed package.
"""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.command_line import interrupted_later, run_command

if TYPE_CHECKING:
    from pipeline.config import Config

_KEYS = """pervit config lists all keys with their defaults; pervit models lists the models, and with a
model's name its switches. SIGTERM, SIGUSR1 or SIGHUP to any process: all save what they have trained and exit with code 75."""


def main() -> int:
    """Train as asked; returns the exit code. All that can be is validated before the slow import of PyTorch and DeepSpeed."""
    from pipeline.config.loading import override_parser

    parser = override_parser("pipeline.train", __doc__, _KEYS)
    parser.add_argument("--config", required=True, type=Path, help="a file, or the name of a shipped config: pervit_t")
    checks = parser.add_mutually_exclusive_group()
    trial = "check everything and take one step on random images with the real model, without writing or changing a file"
    checks.add_argument("--dry-run", action="store_true", help=trial)
    checks.add_argument("--doctor", action="store_true", help="examine the nodes first, as pervit doctor does")
    args = parser.parse_intermixed_args()

    from pipeline.cluster.environment import StopSignal, has_agent, is_first_process

    # From the beginning: starting takes a while. A dry run has nothing to save, and ends at once; so does a rank that waits for
    # others to connect when torchrun, which sends SIGTERM after the first failure, has lost one of them.
    stop = StopSignal()
    with nullcontext() if args.dry_run or has_agent() else stop:
        from pipeline.config import load_config, load_recipe
        from pipeline.logs import console
        from pipeline.models.registry import check_name

        console.outlive_the_terminal()
        console.install()
        config = load_config(args.config, args.overrides)
        check_name(config.model.name)
        check_paths(config, args.dry_run)
        if is_first_process():
            start = "a dry run of " if args.dry_run else ""
            console.say(f"{start}{config.model.name} into {config.output_dir}: loading PyTorch, DeepSpeed and DALI")
        with console.stage("loading the libraries"), interrupted_later():
            from pipeline.training.loop import connect_and_train

        return connect_and_train(config, stop, load_recipe(args.config), args.dry_run, args.doctor)


def check_paths(config: "Config", look_only: bool) -> None:
    """Check, before PyTorch is loaded, that shards, first weights and teacher are where the config says, except what of the data is
    in a store, and that a store of the run can be used; ``look_only``: write nothing there. Raises UserError: one is missing or
    refused."""
    from pipeline.checkpoint.bucket import RunStore
    from pipeline.checkpoint.folder import check_source, saved_steps
    from pipeline.cluster.environment import is_first_process
    from pipeline.errors import UserError
    from pipeline.models.timm.names import is_timm
    from pipeline.shards.mixed_set import of_mix
    from pipeline.shards.shard_set import check_shards
    from pipeline.stores.place import RemotePath, parse_place

    begun = bool(saved_steps(config.folder))
    if isinstance(place := parse_place(config.output_dir), RemotePath):
        begun |= not is_first_process() or RunStore(place).check_access(write=not look_only)
    check_shards(parse_place(config.data.path))
    for path in config.data.mix:
        try:
            check_shards(parse_place(path))
        except UserError as error:
            raise of_mix(error) from None
    train = config.train
    if begun:
        return  # the run goes on with its own weights; its teacher may be gone if nothing is left to train
    if train.init_from and not is_timm(train.init_from):
        check_source(Path(train.init_from), key="train.init_from ", otherwise=", or null to train from random weights")
    if train.teacher_weights and not Path(train.teacher_weights).is_file():
        problem = f"train.teacher_weights {train.teacher_weights} does not exist"
        raise UserError(problem, "pass a file with the teacher's weights")
    if train.teacher and not train.teacher_weights:
        check_source(Path(train.teacher), key="train.teacher ")


command = partial(run_command, main)  # what the script pervit-train calls

if __name__ == "__main__":
    command()
