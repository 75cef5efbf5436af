"""A run folder belongs to one run: the same config continues it, another one is refused."""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.checkpoint import latest_step
from pipeline.config import Config, flatten, load_config
from pipeline.distributed import World
from pipeline.errors import UserError
from pipeline.run_log import CONFIG

# Keys that change neither a weight nor the order of samples, so that a run may go on with other values.
_FREE_SECTIONS = ("eval.", "checkpoint.", "log.")
_FREE_KEYS = (
    "output_dir",
    "data.path",
    "data.num_threads",
    "data.prefetch",
    "data.read_ahead",
    "data.max_bad_samples",
    "train.max_steps",
    "train.activation_checkpointing",
)


def check_same_run(config: Config, world: World) -> Path:
    """Create the run folder, or see that it is this run's own; every process must call.

    Returns:
        The folder.

    Raises:
        UserError: the folder cannot be written, or was begun with another config.
    """
    run_dir = Path(config.output_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"output_dir {run_dir} cannot be created ({error.strerror}), a writable folder needed: choose another output_dir."
        ) from None
    if not os.access(run_dir, os.W_OK):
        raise UserError(f"output_dir {run_dir} is not writable: choose another output_dir.")
    # Without a checkpoint nothing would be continued: a corrected start may begin anew.
    begun = latest_step(run_dir) is not None
    if begun and (run_dir / CONFIG).exists():
        before, now = flatten(load_config(run_dir / CONFIG)), flatten(config)
        for key, value in now.items():
            if before[key] != value and key not in _FREE_KEYS and not key.startswith(_FREE_SECTIONS):
                raise UserError(
                    f"{run_dir} was begun with {key}={before[key]}, this run has {value}: set it back, or choose another output_dir."
                )
    world.barrier()  # nobody writes the config before everybody has read it
    return run_dir
