"""What TensorBoard's HParams compares runs by."""

from __future__ import annotations

from pipeline.config import Config
from pipeline.config.describe import flatten

METRICS = ("eval/top1", "eval/top1_ema", "eval/loss", "train/loss")  # columns by the curves' last values

# The other columns: a key -> what stands for null. They are the same for every run, because TensorBoard takes them from any of them.
_KEYS: dict[str, float | str | None] = {
    **{f"model.{key}": None for key in ("name", "image_size", "drop_path")},
    **{"train.epochs": None, "train.global_batch_size": None, "train.label_smoothing": None, "train.ema_decay": 0},
    **{"train.teacher": "none", "train.init_from": "none"},
    **{f"optim.{key}": 0 for key in ("lr", "min_lr", "warmup_epochs", "weight_decay", "clip_grad_norm")},
    **{
        f"augment.{key}": None
        for key in ("rand_augment_ops", "rand_augment_magnitude", "erasing", "mixup", "cutmix", "repeats")
    },
    "seed": None,
}


def of(config: Config) -> dict[str, float | str]:
    """Dotted key -> value; the model's switches are one text, empty for the paper's model."""
    values = flatten(config)
    chosen = {key: instead if values[key] is None else values[key] for key, instead in _KEYS.items()}
    return {**chosen, "model.switches": " ".join(f"{name}={value}" for name, value in config.model.switches.items())}
