"""Train a detector, or resume a run that was stopped: the same command.

  python -m examples.detection.train --config examples/detection/configs/retinanet_posmlp_t.yaml model.init_from=runs/posmlp_t
  bash launch/local.sh 8 -- examples.detection.train --config examples/detection/configs/mask_rcnn_posmlp_t.yaml

The first is one process, the second one per GPU of a machine with 8.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from pathlib import Path

from examples.detection.config import DetectionConfig
from pipeline.command_line import command_parser, run_command
from pipeline.config import load_config_as

_KEYS = """python -m examples.detection.config lists all keys with their defaults. SIGTERM, SIGUSR1 or SIGHUP to any process: all save
what they have trained and exit with code 75."""


def main() -> int:
    """Parse the command line, load the config, train; returns the exit code."""
    parser = command_parser("examples.detection.train", __doc__, _KEYS)
    parser.add_argument("--config", required=True, type=Path, help="a YAML file of detection keys")
    parser.add_argument("overrides", nargs="*", metavar="dotted.key=value", help="for example train.epochs=36")
    args = parser.parse_args()

    from pipeline.cluster.environment import StopSignal

    with StopSignal() as stop:  # from the beginning: starting takes a while
        from pipeline.logs import console
        from pipeline.models.registry import check_name

        console.outlive_the_terminal()
        console.install()
        config = load_config_as(DetectionConfig, args.config, args.overrides)
        check_name(config.model.name)
        return import_module("examples.detection.loop").connect_and_train(config, stop)  # imports PyTorch


command = partial(run_command, main)

if __name__ == "__main__":
    command()
