"""Train a detector, or resume a run that was stopped: the same command.

  python -m examples.detection.train --config examples/detection/configs/retinanet_posmlp_t.yaml model.init_from=runs/posmlp_t
  bash launch/local.sh 8 -- examples.detection.train --config examples/detection/configs/mask_rcnn_posmlp_t.yaml

The first is one process, the second one per GPU of a machine with 8. With --exit-code, that of a run which stopped, it says
whether that run may be restarted, as pipeline.training.restart does: the job script asks.
"""

import sys
from importlib import import_module
from pathlib import Path

from examples.detection.config import DetectionConfig
from pipeline.cluster.environment import StopSignal
from pipeline.command_line import run_command
from pipeline.config import load_config_as
from pipeline.config.loading import override_parser
from pipeline.logs import console
from pipeline.models.registry import check_name
from pipeline.training.restart import answer

_NAME = "examples.detection.train"
_KEYS = """python -m examples.detection.config lists all keys with their defaults. SIGTERM, SIGUSR1 or SIGHUP to any process:
all save what they have trained and exit with code 75."""


def main() -> int:
    """Parse the command line, load the config, train; returns the exit code."""
    if "--exit-code" in sys.argv:
        return answer(_NAME, __doc__, lambda path, words: load_config_as(DetectionConfig, path, words).output_dir)
    parser = override_parser(_NAME, __doc__, _KEYS, example="train.epochs=36")
    parser.add_argument("--config", required=True, type=Path, help="a YAML file of detection keys")
    args = parser.parse_intermixed_args()
    with StopSignal() as stop:  # from the beginning: starting takes a while
        console.outlive_the_terminal()
        console.install()
        config = load_config_as(DetectionConfig, args.config, args.overrides)
        check_name(config.model.name)
        return import_module("examples.detection.loop").connect_and_train(config, stop)  # imports PyTorch


if __name__ == "__main__":
    run_command(main)
