"""Examine the nodes of a job before it trains: in three minutes at most a table, a verdict, and the nodes to leave out.

  pervit doctor --config pervit_t data.path=SHARD_DIR
  bash launch/local.sh 2 -- pipeline.doctor --config pervit_t data.path=SHARD_DIR

Of each node: versions, memory, CPUs and GPUs, the data and its checksums, cache and output_dir, the GPU's decoder, the clock, the links to
others. On a cluster: sbatch --nodes=4 launch/doctor.slurm pervit_t. Or before a training: pervit train --doctor
"""

import os
import sys
import tempfile
from pathlib import Path

from pipeline.command_line import run_command

_EPILOG = "The exit code is 1 if anything is wrong. If a node is to be left out, the last line is --exclude=NODES, for sbatch."


def main() -> int:
    from pipeline.config.loading import override_parser

    parser = override_parser("pipeline.doctor", __doc__, _EPILOG, example="data.path=SHARD_DIR")
    parser.add_argument("--config", required=True, type=Path, help="of the training: a file, or the name of a shipped config")
    parser.add_argument("--seconds", type=float, default=180.0, help="limit of it all (default: 180)")
    args = parser.parse_intermixed_args()
    from pipeline.config import load_config
    from pipeline.errors import NotConnected, UserError

    if not 5 <= args.seconds <= 3600:
        raise UserError(f"--seconds must be from 5 to 3600, got {args.seconds:g}", "correct it")
    config = load_config(args.config, args.overrides)
    from pipeline.cluster.rendezvous import disconnect, init_world
    from pipeline.health.nodes import absent, examine
    from pipeline.logs import console

    console.install()
    try:
        # NCCL's watchdog must not end a rank before it is named.
        world = init_world(args.seconds / 3, Path(tempfile.gettempdir()))
        verdict = examine(config, world, args.seconds)
    except NotConnected as error:
        if os.environ.get("RANK", "0") in ("0", "1"):  # the second: rank 0 may be what is missing
            print("\n".join([str(error), *absent(error.missing)]), flush=True)
        return 1
    if world.is_main:
        print("\n".join(verdict.lines), flush=True)
    if verdict.sick:  # some thread may wait for a disk or for another rank without end
        sys.stdout.flush()
        os._exit(1)
    disconnect()
    return 0


if __name__ == "__main__":
    run_command(main)
