"""A run folder belongs to one run: one process group at a time, the same config, the same data set.

What differs is refused with one sentence that names it. ``checkpoint.accept`` takes the keys, or sections, whose change is meant;
``data`` in it stands for another data set.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from pipeline.agreement import do_in_main
from pipeline.config import Config, flatten
from pipeline.distributed import World
from pipeline.errors import UserError
from pipeline.run_lock import RunLock

# Keys that change neither the order of samples nor a weight beyond the rounding of sums, so that a run may go on with other
# values. The micro-batch is one of them so that a run can move to other hardware: whatever is drawn belongs to an image's place
# in the global batch (Mixup's groups too), but BatchNorm, where a model has it, normalizes over one micro-batch at a time.
_FREE_SECTIONS = ("eval.", "checkpoint.", "log.", "distributed.")
_FREE_KEYS = (
    "output_dir",
    "data.path",
    "data.num_threads",
    "data.prefetch",
    "data.read_ahead",
    "data.max_bad_samples",
    "train.activation_checkpointing",
    "train.max_skipped_steps",
    "train.max_steps",
    "train.micro_batch_size",
    "train.zero_stage",
)
# No checkpoint fits another shape; with another batch the place in the stream would jump over samples, or back.
_NEVER = ("model.name", "model.image_size", "model.num_classes", "model.switches", "train.global_batch_size")
_DATA = "data"  # in checkpoint.accept: another data set. Keys of the section `data` are accepted one by one.
_NAMED = 5  # differences that a sentence lists
_DIGITS = 12  # of a digest, as `inspect` shows it
_DYING_SECONDS = 120.0  # for the former life of a restarted job; a network file system frees a dead node's locks after about 90


def open_run_folder(config: Config, world: World) -> RunLock | None:
    """Create the run folder and lock it; every process must call.

    A job that Slurm restarted waits a while for what is left of its former life.

    Returns:
        In the main process the lock, to be kept as long as the run writes; None in the others.

    Raises:
        UserError: in every process: the folder cannot be created, written or locked, or another run has it.
    """
    return do_in_main(lambda: _lock(Path(config.output_dir)), world)


def check_same_run(config: Config, begun_with: Config | None, world: World) -> None:
    """See that a config may continue a run; each process that calls comes to the same result.

    Args:
        config: of this start.
        begun_with: of the newest checkpoint; None when there is none: a corrected start may begin anew.
        world: the main process prints what was accepted.

    Raises:
        UserError: keys differ that must not, or ``checkpoint.accept`` names something unknown.
    """
    _check_accepted_names(config)
    if begun_with is None:
        return
    before, now = flatten(begun_with), flatten(config)
    if now["train.precision"] == "auto":  # which keeps what the run was begun with
        now["train.precision"] = before["train.precision"]
    changed = [key for key in now if not is_free(key) and before.get(key) != now[key]]
    accepted = [key for key in changed if _is_accepted(key, config) and key not in _NEVER]
    refused = [key for key in changed if key not in accepted]
    if refused:
        raise UserError(_refusal(config.output_dir, {key: (before.get(key), now[key]) for key in refused}))
    if accepted and world.is_main:
        changes = ", ".join(f"{key} from {before.get(key)} to {now[key]}" for key in accepted)
        print(f"note: this run changes {changes}, which checkpoint.accept allows.", flush=True)


def check_same_data(config: Config, begun_with: dict[str, Any] | None, now: dict[str, Any], world: World) -> None:
    """See that a run goes on with the data set it was begun with; each process that calls comes to the same result.

    Args:
        config: of this start.
        begun_with: ``ShardSet.identity()`` as the newest checkpoint has it; None when there is none.
        now: that of this start's training set.
        world: the main process prints what was accepted.

    Raises:
        UserError: it is another set, and ``checkpoint.accept`` does not name ``data``.
    """
    if begun_with is None or begun_with == now:
        return
    keys = [key for key in sorted({*begun_with, *now}) if begun_with.get(key) != now.get(key)]
    differences = ", ".join(f"{key}={_short(begun_with.get(key))} (this one has {_short(now.get(key))})" for key in keys)
    if _DATA not in config.checkpoint.accept:
        raise UserError(
            f"{config.output_dir} was begun with another data set than {config.data.path}, one with {differences}: set data.path "
            f"back, choose another output_dir, or accept the change with checkpoint.accept=[{_DATA}]."
        )
    if world.is_main:
        print(f"note: this run was begun with a data set with {differences}, which checkpoint.accept allows.", flush=True)


def config_hash(config: Config) -> str:
    """SHA-256, hexadecimal, over the keys that decide the weights: equal for two starts that may continue each other."""
    decisive = {key: value for key, value in flatten(config).items() if not is_free(key)}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def is_free(key: str) -> bool:
    """Whether a run may go on with another value of a key, given as in :func:`pipeline.config.flatten`."""
    return key in _FREE_KEYS or key.startswith(_FREE_SECTIONS)


def _lock(run_dir: Path) -> RunLock:
    restarted = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    return RunLock.take(run_dir, wait_seconds=_DYING_SECONDS if restarted else 0)


def _is_accepted(key: str, config: Config) -> bool:
    section = key.partition(".")[0]
    return key in config.checkpoint.accept or (section != _DATA and section in config.checkpoint.accept)


def _short(value: Any) -> Any:
    """A digest's first digits tell two of them apart."""
    return value[:_DIGITS] if isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) else value


def _check_accepted_names(config: Config) -> None:
    keys = list(flatten(config))
    known = [*keys, *dict.fromkeys(key.partition(".")[0] for key in keys if "." in key)]
    for name in config.checkpoint.accept:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            remedy = f"did you mean {close[0]!r}?" if close else "remove it; `python -m pipeline.config` lists the keys."
            raise UserError(f"checkpoint.accept names {name!r}, a key, a section or `{_DATA}` needed: {remedy}")


def _refusal(run_dir: str, changes: dict[str, tuple[Any, Any]]) -> str:
    """The sentence about keys whose value before and now differ."""
    named = list(changes.items())[:_NAMED]
    begun = "; ".join(f"{'with ' if i else ''}{key}={old}, this run has {new}" for i, (key, (old, new)) in enumerate(named))
    more = f"; and {len(changes) - _NAMED} more keys differ" if len(changes) > _NAMED else ""
    never = [key for key in changes if key in _NEVER]
    if never:
        way_out = (
            f"or choose another output_dir (no run can go on with another {' or '.join(never)}, so that cannot be accepted)"
        )
    else:
        keys = ",".join([key for key, _ in named] + ["..."] * bool(more))
        change = "change" if len(changes) == 1 else "changes"
        way_out = f"choose another output_dir, or accept the {change} with checkpoint.accept=[{keys}]"
    back = "set it back" if len(changes) == 1 else "set them back"
    return f"{run_dir} was begun with {begun}{more}: {back}, {way_out}."
