"""Check that a start may write into a run folder: one job at a time, the same config, the same data set.

A difference is refused with an error that names it. ``checkpoint.accept`` lists keys, or sections, that may change on purpose;
``data`` in it means another data set.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from pathlib import Path
from typing import Any

from pipeline.cluster.agreement import do_in_main
from pipeline.cluster.world import World
from pipeline.config import Config, flatten, is_free
from pipeline.config.problems import nearest_keys
from pipeline.errors import UserError
from pipeline.training.lock import RunLock

_log = logging.getLogger(__name__)

# A checkpoint does not fit other shapes, nor its moments another optimizer; another global batch size would skip or repeat samples
# of the stream.
_NEVER = ("model.name", "model.image_size", "model.num_classes", "model.switches", "optim.name", "train.global_batch_size")
_DATA = "data"  # in checkpoint.accept: another data set. Keys of the section `data` are accepted one by one.
_NAMED = 5  # differences listed in a message
_DIGITS = 12  # of a digest in a message, as in `inspect`
_DYING_SECONDS = 120.0  # for the previous start of a requeued job to end; NFS frees a dead node's locks after about 90


def open_run_folder(folder: Path, world: World) -> RunLock | None:
    """Create the run folder and lock it. Collective.

    A requeued Slurm job waits for processes of its previous start to end.

    Returns:
        The lock on rank 0, to be held while the run writes; None elsewhere.

    Raises:
        UserError: on every rank: the folder cannot be created, written or locked, or another run holds it.
    """
    return do_in_main(lambda: _lock(folder), world)


def check_same_run(config: Config, begun_with: Config | None, world: World) -> None:
    """Check that a config may continue a run. The result is the same on every rank, without communication.

    Args:
        begun_with: of the newest checkpoint; None if there is none, when everything may change.
        world: rank 0 logs the accepted changes.

    Raises:
        UserError: a key differs that must not, or ``checkpoint.accept`` names an unknown key.
    """
    _check_accepted_names(config)
    if begun_with is None:
        return
    before, now = flatten(begun_with), flatten(config)
    if now["train.precision"] == "auto":  # auto keeps the precision of the run
        now["train.precision"] = before["train.precision"]
    changed = [key for key in now if not is_free(key) and before.get(key) != now[key]]
    accepted = [key for key in changed if _is_accepted(key, config) and key not in _NEVER]
    refused = [key for key in changed if key not in accepted]
    if refused:
        raise _refusal(config.output_dir, {key: (before.get(key), now[key]) for key in refused})
    if accepted and world.is_main:
        changes = ", ".join(f"{key} from {before.get(key)} to {now[key]}" for key in accepted)
        _log.info(f"note: this run changes {changes}, which checkpoint.accept allows.")


def check_same_data(config: Config, begun_with: dict[str, Any] | None, now: dict[str, Any], world: World) -> None:
    """Check that a run continues with its data set. The result is the same on every rank, without communication.

    Args:
        begun_with: ``ShardSet.identity()`` from the newest checkpoint; None if there is none.
        now: the same of this start's training set.
        world: rank 0 logs an accepted change.

    Raises:
        UserError: it is another data set, and ``checkpoint.accept`` does not list ``data``.
    """
    if begun_with is None or begun_with == now:
        return
    keys = [key for key in sorted({*begun_with, *now}) if begun_with.get(key) != now.get(key)]
    differences = ", ".join(f"{key}={_short(begun_with.get(key))} (got {_short(now.get(key))})" for key in keys)
    if _DATA not in config.checkpoint.accept:
        raise UserError(
            f"{config.output_dir} was started with another data set than {config.data.path}, one with {differences}",
            f"set data.path back, choose another output_dir, or accept the change with checkpoint.accept=[{_DATA}]",
        )
    if world.is_main:
        _log.info(f"note: this run was started with a data set with {differences}, which checkpoint.accept allows.")


def config_hash(config: Config) -> str:
    """SHA-256, hexadecimal, of the keys that determine the weights: equal for two starts of one run."""
    decisive = {key: value for key, value in flatten(config).items() if not is_free(key)}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def _lock(run_dir: Path) -> RunLock:
    restarted = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    return RunLock.take(run_dir, wait_seconds=_DYING_SECONDS if restarted else 0)


def _is_accepted(key: str, config: Config) -> bool:
    section = key.partition(".")[0]
    return key in config.checkpoint.accept or (section != _DATA and section in config.checkpoint.accept)


def _short(value: Any) -> Any:
    """Shorten digests: the first digits tell two of them apart."""
    return value[:_DIGITS] if isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) else value


def _check_accepted_names(config: Config) -> None:
    keys = flatten(config)
    for name in config.checkpoint.accept:
        if name not in keys and not any(key.startswith(f"{name}.") for key in keys):
            close = nearest_keys(name)
            remedy = f"did you mean {close[0]!r}?" if close else "remove it; `python -m pipeline.config` lists the keys."
            raise UserError(f"checkpoint.accept must list keys, sections or `{_DATA}`, got {name!r}: {remedy}")


def _refusal(run_dir: str, changes: dict[str, tuple[Any, Any]]) -> UserError:
    """For keys whose values differ from the run's, as key -> (before, now)."""
    named, never = dict(list(changes.items())[:_NAMED]), [key for key in changes if key in _NEVER]
    begun = "; ".join(f"with {key}={old}, got {new}" for key, (old, new) in named.items())
    keys, more = ",".join(named), len(changes) - len(named)
    if more:
        begun, keys = f"{begun}; and {more} more keys differ", f"{keys},..."
    back, change = ("set it back", "change") if len(changes) == 1 else ("set them back", "changes")
    if never:
        reason = f"no run can continue with another {' or '.join(never)}, so that cannot be accepted"
        return UserError(f"{run_dir} was started {begun}", f"{back}, or choose another output_dir ({reason})")
    accept = f"accept the {change} with checkpoint.accept=[{keys}]"
    return UserError(f"{run_dir} was started {begun}", f"{back}, choose another output_dir, or {accept}")
