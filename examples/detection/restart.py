"""Decide whether a detection run that stopped may be restarted. The job script asks before it requeues its job.

    python -m examples.detection.restart --exit-code 75 --config examples/detection/configs/retinanet_posmlp_t.yaml
    python -m examples.detection.restart --exit-code 137 --config examples/detection/configs/retinanet_posmlp_t.yaml output_dir=runs/x

The rules and the answer are those of pipeline.training.restart.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from examples.detection.config import DetectionConfig
from pipeline.config import load_config_as
from pipeline.training.restart import answer


def newest_step(run: Path) -> int | None:
    """The step of the newest checkpoint; None: there is none.

    By the names of the files that complete one, without PyTorch: the job may have seconds left, and the next start looks closer.
    """
    found = (re.fullmatch(r"step-(\d+)\.json", path.name) for path in (run / "checkpoints").glob("step-*.json"))
    return max((int(name[1]) for name in found if name), default=None)


def run_folder(config: Path, overrides: list[str]) -> str:
    """Where a training with this config writes."""
    return load_config_as(DetectionConfig, config, overrides).output_dir


if __name__ == "__main__":
    sys.exit(answer("examples.detection.restart", __doc__, run_folder, newest_step))
