"""Decide whether a detection run that stopped may be restarted. The job script asks before it requeues its job.

    python -m examples.detection.restart --exit-code 75 --config examples/detection/configs/retinanet_posmlp_t.yaml
    python -m examples.detection.restart --exit-code 137 --config examples/detection/configs/retinanet_posmlp_t.yaml output_dir=runs/x

The rules and the answer are those of pipeline.faults.restart.
"""

from __future__ import annotations

import sys
from pathlib import Path

from examples.detection.checkpoints import newest_checkpoint
from examples.detection.config import DetectionConfig
from pipeline.config import load_config_as
from pipeline.faults.restart import answer


def newest_step(run: Path) -> int | None:
    """The step of the newest intact checkpoint; None: there is none."""
    newest = newest_checkpoint(run)
    return newest.step if newest else None


def run_folder(config: Path, overrides: list[str]) -> str:
    """Where a training with this config writes."""
    return load_config_as(DetectionConfig, config, overrides).output_dir


if __name__ == "__main__":
    sys.exit(answer("examples.detection.restart", __doc__, run_folder, newest_step))
