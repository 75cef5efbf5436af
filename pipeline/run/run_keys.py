"""What the keys of a config are to a run: which a resumed run may change, and what those mean that former runs have not recorded."""

from __future__ import annotations

from typing import Any

from pipeline.config import Config, config_from_dict

# Keys that a resumed run may change freely: they affect neither the order of samples nor the weights beyond rounding. The
# micro-batch size is one of them so that a run can move to other hardware: all random draws, Mixup's groups too, depend on an
# image's position in the global batch. Only BatchNorm, in models that have it, normalizes over a micro-batch.
_FREE_SECTIONS = ("eval.", "checkpoint.", "log.", "distributed.")
_FREE_KEYS = (
    "output_dir",
    "data.path",
    "data.mix",  # as data.path: the sets themselves, and their weights, are compared by their identity
    "data.cache",
    "data.cache_gib",
    "data.decode",
    "data.num_threads",
    "data.prefetch",
    "data.read_ahead",
    "data.max_bad_samples",
    "train.activation_checkpointing",
    "train.deterministic",
    "train.compile",
    "train.max_skipped_steps",
    "train.max_steps",
    "train.micro_batch_size",
    "train.zero_stage",
)
# Keys whose default is not what runs did before the key was there: key -> what they did.
FORMER: dict[str, Any] = {"optim.warmup_prefix": True}


def recorded_config(recorded: dict[str, Any], source: str) -> Config:
    """The config that a checkpoint has recorded. A key that was not there yet means what runs did then.

    Raises:
        UserError: it is not valid; the message names ``source``.
    """
    tree = {section: dict(values) if isinstance(values, dict) else values for section, values in recorded.items()}
    for key, value in FORMER.items():
        section, _, name = key.partition(".")
        if isinstance(tree.get(section), dict):
            tree[section].setdefault(name, value)
    return config_from_dict(tree, source)


def is_free(key: str) -> bool:
    """Whether a resumed run may change a key, given as in :func:`pipeline.config.flatten`."""
    return key in _FREE_KEYS or key.startswith(_FREE_SECTIONS)
