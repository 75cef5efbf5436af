"""Decide whether a detection run that stopped may be restarted. The job script asks before it requeues its job.

    python -m examples.detection.restart --exit-code 75 --config examples/detection/configs/retinanet_posmlp_t.yaml
    python -m examples.detection.restart --exit-code 137 --config examples/detection/configs/retinanet_posmlp_t.yaml output_dir=runs/x

The rules and the answer are those of pipeline.training.restart.
"""

import sys

from examples.detection.config import DetectionConfig
from pipeline.config import load_config_as
from pipeline.training.restart import answer

if __name__ == "__main__":
    name = "examples.detection.restart"
    sys.exit(answer(name, __doc__, lambda path, words: load_config_as(DetectionConfig, path, words).output_dir))
