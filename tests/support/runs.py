"""A config for a run of seconds, and what a run has logged."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from pipeline.export import read_subject
from pipeline.exporting.weights_file import export_safetensors
from pipeline.models.weights.reference_names import Names
from support.precisions import FP32
from support.ranks import run_forked
from support.small_run import SMALL_MODEL


def write_small_config(digits_shards: Path, folder: Path) -> Path:
    """A config file for a run of seconds in ``folder``: PerViT-T at 32 pixels on the digits, every randomness on."""
    config = {
        "output_dir": str(folder / "run"),
        "model": {"name": "pervit_t", "image_size": 32, "num_classes": 10, "drop_path": 0.1},
        "data": {"path": str(digits_shards), "num_threads": 1},
        "augment": {"rand_augment_ops": 2, "erasing": 0.25, "mixup": 0.8, "cutmix": 1.0, "mix_group": 4},
        "train": {"epochs": 10, "global_batch_size": 16, "micro_batch_size": 4, "precision": FP32},
        "optim": {"warmup_epochs": 0.1},
        "eval": {"every_epochs": None},
        "checkpoint": {"every_steps": None},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def train_twice_saved(digits_shards: Path, folder: Path) -> Path:
    """Train two steps: a run with an average and checkpoints of both, evaluated after the second, with a crop and a mean of its own."""
    arguments = ("--config", write_small_config(digits_shards, folder), *SMALL_MODEL, "train.max_steps=2")
    run_forked("pipeline.train", *arguments, "checkpoint.every_steps=1", "data.eval_crop=0.8", "data.mean=[0.4, 0.5, 0.6]")
    return folder / "run"


# Biases before a BatchNorm, which takes them out: their gradient is rounding, of which AdamW makes steps of full size.
NO_GRADIENT = re.compile(r"stem\.layers\.\d\.0\.bias")


def step_rows(run_dir: Path) -> list[dict]:
    """The rows of metrics.jsonl that are training steps."""
    return [row for row in _rows(run_dir) if "lr" in row]


def evaluation_rows(run_dir: Path) -> list[dict]:
    """The rows of metrics.jsonl that are evaluations."""
    return [row for row in _rows(run_dir) if "top1" in row]


def _rows(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]


def export_weights(run: Path, file: Path, step: int | str | None = None, names: Names = "ours") -> None:
    """Export a run's weights to a safetensors file, as ``pervit export`` does."""
    export_safetensors(read_subject(run, step, None, names), file)
