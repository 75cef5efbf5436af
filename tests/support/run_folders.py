"""Run folders as a training leaves them, without the training: config.yaml and the rows of metrics.jsonl."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.config import config_to_yaml, load_config


def write_run(
    folder: Path,
    config: str,
    *overrides: str,
    top1: float | None = 50.0,
    images: int = 50_000,
    count: int = 10_000,
    steps: int = 20,
) -> Path:
    """A run that is finished, copied without its checkpoints: ``steps`` rows over its whole schedule, then an evaluation. Where ``top1`` is
    None there is none, and the run was stopped before it."""
    resolved = load_config(config, [*overrides, f"output_dir={folder}"])
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("# precision fp32\n" + config_to_yaml(resolved))
    batch = resolved.train.global_batch_size
    last = -(-int(resolved.train.epochs * images) // batch)
    rows: list[dict] = []
    for number in range(1, steps + 1):
        step = max(number, last * number // steps) if last >= steps else number
        rows.append({"step": step, "time": 1.7e9 + step, "epoch": step * batch / images, "samples": step * batch, "loss": 2 / number,
                     "lr": 1e-3, "grad_norm": 1.0, "images_per_second": 300.0})  # fmt: skip
    if top1 is not None:
        rows.append({**{key: rows[-1][key] for key in ("step", "time", "epoch", "samples")}, "weights": "model", "top1": top1, "top5": 99.0,
                     "loss": 1.5, "correct1": 1, "correct5": 2, "count": count})  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole = top1 is not None
    events = [
        {"event": "start", "step": 0, "last_step": last},
        {"event": "end", "step": last, "reason": "its end", "whole": whole},
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps({**event, "time": 1.7e9}) + "\n" for event in events))
    return folder
