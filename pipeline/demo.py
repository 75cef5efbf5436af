"""Train on handwritten digits: from JPEG files to a trained, evaluated PerViT-T on this machine, in a few minutes.

    pervit demo
    pervit demo --steps 5
    CUDA_VISIBLE_DEVICES= pervit demo train.epochs=2

The last two are a short run to see that everything works, and one on the CPU of a machine with GPUs. Each step is a command of a real
run. Writes demo/ and runs/demo/ in the current folder; a second call skips what is done.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from pipeline.command_line import LAUNCHER, python_command, run_command
from pipeline.errors import UserError, counted
from pipeline.runs import METRICS

_IMAGES = "demo/images"


def main() -> None:
    """Run the four steps. The first that fails ends the process with its exit code."""
    from pipeline.config import load_config
    from pipeline.config.loading import override_parser

    parser = override_parser("pipeline.demo", __doc__, example="train.epochs=2")
    parser.add_argument("--steps", type=int, metavar="N", help="train for N steps only: train.max_steps=N")
    args = parser.parse_intermixed_args()
    if args.steps is not None and args.steps < 1:
        raise UserError(f"--steps must be at least 1, got {args.steps}", "correct it")
    overrides = [*args.overrides, *([] if args.steps is None else [f"train.max_steps={args.steps}"])]
    config = load_config("demo", overrides)  # a mistake is found before anything is written
    shards, run = config.data.path, config.output_dir
    # Two processes if there are two GPUs, or two cores without a GPU, and the launcher that starts them.
    places = len(os.sched_getaffinity(0))
    if shutil.which("nvidia-smi"):
        places = len(subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True).stdout.splitlines())
    processes = 2 if places > 1 and LAUNCHER.is_file() else 1
    training = f"{config.model.name}, DALI and DeepSpeed, {counted(processes, 'process')} (log: {run}/{METRICS})"

    start = time.monotonic()
    print("== 1/4 images: scikit-learn's handwritten digits as JPEG files", flush=True)
    _run(1, "data_prep.make_demo_dataset", "--output", _IMAGES)
    print("== 2/4 shards: WebDataset tars with indexes", flush=True)
    _run(1, "data_prep.shard_imagenet", "--source", _IMAGES, "--output", shards, "--samples-per-shard", "400")
    print(f"== 3/4 training: {training}", flush=True)
    # The global batch of 64 is 32 images on each of 2 processes, or 2 x 32 accumulated on one.
    _run(processes, "pipeline.train", "--config", "demo", *overrides)
    print("== 4/4 evaluation of the saved checkpoint", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        _run(1, "pipeline.evaluate", "--checkpoint", run, "--data", shards, "--json", str(result), output=subprocess.DEVNULL)
        found = json.loads(result.read_text())
    print("\n" + summary(found, Path(run), round(time.monotonic() - start), processes))


def _run(processes: int, *words: str, output: int | None = None) -> None:
    """Run a step to its end, whatever signals come; exit as it does if it fails."""
    process = subprocess.Popen(python_command(processes, *words), stdout=output)
    signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C reaches the step by itself, which says what it has saved
    code = process.wait()
    if code:
        sys.exit(code if code > 0 else 128 - code)  # as shells count it


def summary(result: dict[str, Any], run: Path, seconds: int, processes: int) -> str:
    """What the demo ends with: model, accuracy (``result``, as ``evaluate --json`` writes it), where it is, what is next."""
    from pipeline.runs.folder import RunFolder

    trained = RunFolder(run)
    speeds = trained.curve("images_per_second")[1]  # (steps,)
    rows = {
        "accuracy": f"{result['top1']:.1f} % top-1 on {result['count']} held-out images",
        "speed": f"{median(speeds):.0f} images/s in training, {counted(processes, 'process')}, {trained.value('train.precision')}",
        "wall time": f"{seconds // 60} min {seconds % 60} s for all four parts",
        "model": f"{result['model']}, after {counted(len(speeds), 'step')}",
        "results": f"{run}/: checkpoints/, metrics.jsonl, tensorboard/, config.yaml",
    }
    activated = sys.prefix == sys.base_prefix or os.environ.get("VIRTUAL_ENV") == sys.prefix
    environment = os.path.relpath(sys.prefix)
    environment = sys.prefix if environment.startswith("..") else environment
    commands = {
        **({} if activated else {"the environment of these commands": f"source {environment}/bin/activate"}),
        "look at curves, images and position maps": "tensorboard --logdir runs",
        "train another model, the same way": "pervit train --config demo model.name=deit_t output_dir=runs/demo_deit",
        "your own images, FOLDER/CLASS/*.jpg; a tenth is set aside for evaluation": "pervit shard --source FOLDER --val-share 0.1 "
        "--output data/mine",
    }
    table = [f"  {name:<10}{value}" for name, value in rows.items()]
    following = [line for what, command in commands.items() for line in (f"  # {what}", f"  {command}")]
    return "\n".join(["It was trained to read handwritten digits:", *table, "", "Next:", *following])


if __name__ == "__main__":
    run_command(main)
