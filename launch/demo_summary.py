"""The end of ``make demo``: what was trained, how well, where it is, and what to do next.

python launch/demo_summary.py RESULT.json RUN_DIR SECONDS PROCESSES
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import yaml


def summary(result: dict, run_dir: Path, seconds: int, processes: int) -> str:
    """The table and the commands.

    Args:
        result: what ``pipeline.evaluate --json`` wrote.
        run_dir: the run folder.
        seconds: wall time of the demo so far.
        processes: that trained.
    """
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if "lr" in row]
    speed = statistics.median(row["images_per_second"] for row in steps)
    precision = yaml.safe_load((run_dir / "config.yaml").read_text())["train"]["precision"]
    rows = {
        "accuracy": f"{result['top1']:.1f} % top-1 on {result['count']} images that it was not trained on",
        "speed": f"{speed:.0f} images/s in training, {processes} process{'es' if processes > 1 else ''}, {precision}",
        "wall time": f"{seconds // 60} min {seconds % 60} s for all four parts",
        "model": f"{result['model']}, after {len(steps)} steps",
        "results": f"{run_dir}/: checkpoints/, metrics.jsonl, tensorboard/, config.yaml",
    }
    commands = {
        "look at curves, images and position maps": ".venv/bin/tensorboard --logdir runs",
        "train another model, the same way": "source .venv/bin/activate && bash launch/local.sh 2 -- pipeline.train "
        "--config configs/demo.yaml model.name=deit_t output_dir=runs/demo_deit",
        "your own images: a folder FOLDER/<class>/*.jpg, a tenth of which is set aside for evaluation": "source .venv/bin/activate && python -m data_prep.shard_imagenet "
        "--source FOLDER --val-share 0.1 --output data/mine",
    }
    table = [f"  {name:<10}{value}" for name, value in rows.items()]
    following = [line for what, command in commands.items() for line in (f"  # {what}", f"  {command}")]
    return "\n".join(["It learned to read handwritten digits:", *table, "", "Next:", *following])


if __name__ == "__main__":
    print(summary(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
