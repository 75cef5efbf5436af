"""Stands in for ``pipeline.train`` where Slurm is what is tested: the same signals, exit codes and files, and no mathematics.

A step is a pause of TOY_SECONDS; TOY_EXIT is an exit code to fail with at once. Rank 0 writes ``config.yaml``, ``metrics.jsonl``,
before the last save with an evaluation, and checkpoints without weights. Each rank leaves its process id in the run folder until it ends in order, so that the others see it die.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

from pipeline.checkpoint.manifest import MANIFEST, CheckpointManifest, RunState
from pipeline.config import Config, config_to_yaml, load_config
from pipeline.errors import PREEMPTED, RANK_LOST

RANK = os.environ["SLURM_PROCID"]
LIFE = f"{os.environ['SLURM_JOB_ID']}-{os.environ.get('SLURM_RESTART_COUNT', '0')}"
stopped_by: list[int] = []


def newest(checkpoints: Path) -> int:
    return max((int(path.name.removeprefix("step-")) for path in checkpoints.glob("step-*")), default=0)


def drop_rows_after(metrics: Path, step: int) -> None:
    rows = metrics.read_text().splitlines() if metrics.exists() else []
    metrics.write_text("".join(row + "\n" for row in rows if json.loads(row)["step"] <= step))


def write_down(run: Path, config: Config, step: int, with_checkpoint: bool) -> None:
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "lr": 0.0}) + "\n")
        if step == config.train.max_steps:
            result = {"weights": "model", "top1": 50.0, "top5": 90.0, "loss": 1.0, "count": 100}
            file.write(json.dumps({"step": step, **result}) + "\n")
    if with_checkpoint:
        state = RunState(
            step=step, samples=0, skipped_steps=0, config=config.model_dump(mode="json"), config_hash="0" * 64, classes=[],
            data={"samples": 1, "fingerprint": "f"}, world_size=1, zero_stage=0, last_step=config.train.max_steps,
        )  # fmt: skip
        hidden = run / "checkpoints" / ".saving"
        hidden.mkdir(parents=True, exist_ok=True)
        (hidden / MANIFEST).write_text(CheckpointManifest(state, {}, [], []).to_text())
        hidden.rename(hidden.with_name(f"step-{step:08d}"))


def died(path: Path) -> bool:
    try:
        return not Path("/proc", path.read_text() or "self").exists()
    except FileNotFoundError:  # it has just ended in order
        return False


def train(config: Config, run: Path) -> int:
    first, last = newest(run / "checkpoints"), config.train.max_steps
    if RANK == "0":
        (run / "config.yaml").write_text(config_to_yaml(config))
        drop_rows_after(run / "metrics.jsonl", first)
    print(f"steps {first} to {last}", flush=True)
    for step in range(first + 1, last + 1):
        time.sleep(float(os.environ.get("TOY_SECONDS", 0.05)))
        stop = bool(stopped_by)  # read once: the signal may come at any line
        if RANK == "0":
            write_down(run, config, step, stop or step == last or step % config.checkpoint.every_steps == 0)
        if stop:
            print(f"stopped by signal {stopped_by[0]} after step {step}", flush=True)
            return PREEMPTED
        lost = [path.stem for path in run.glob(f"{LIFE}-*.pid") if died(path)]
        if lost:
            print(f"lost {lost}", flush=True)
            return RANK_LOST
    return 0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    config = load_config(args.config, args.overrides)
    if "TOY_EXIT" in os.environ:
        return int(os.environ["TOY_EXIT"])
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda received, frame: stopped_by.append(received))
    run = Path(config.output_dir)
    run.mkdir(parents=True, exist_ok=True)
    alive = run / f"{LIFE}-{RANK}.pid"
    alive.write_text(str(os.getpid()))
    code = train(config, run)
    alive.unlink()
    return code


if __name__ == "__main__":
    sys.exit(main())
