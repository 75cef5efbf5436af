"""Look at the paths of a config before PyTorch is loaded: a wrong one is said within a second."""

from __future__ import annotations

from pathlib import Path

from pipeline.checkpoint.bucket import RunStore
from pipeline.checkpoint.folder import check_source, saved_steps
from pipeline.config import Config
from pipeline.errors import UserError
from pipeline.logs.console import is_first_process
from pipeline.models.registry import is_timm
from pipeline.shards.mixed_set import of_mix
from pipeline.shards.shard_set import check_shards
from pipeline.stores.place import RemotePath, parse_place


def check_paths(config: Config, look_only: bool = False) -> None:
    """Check that shards, first weights and teacher are where the config says, what of the data is in a store is left to the start, and
    that a store of the run can be used.

    Args:
        look_only: write nothing there.

    Raises:
        UserError: one is missing or refused.
    """
    begun = bool(saved_steps(config.folder))
    if isinstance(place := parse_place(config.output_dir), RemotePath):
        store = RunStore(place)
        begun |= not is_first_process() or store.check_access(write=not look_only)
    check_shards(parse_place(config.data.path))
    for path in config.data.mix:
        try:
            check_shards(parse_place(path))
        except UserError as error:
            raise of_mix(error) from None
    train = config.train
    if begun:
        return  # the run goes on with its own weights; its teacher may be gone if nothing is left to train
    if train.init_from and not is_timm(train.init_from):
        check_source(Path(train.init_from), key="train.init_from ", otherwise=", or null to train from random weights")
    if train.teacher_weights and not Path(train.teacher_weights).is_file():
        raise UserError(
            f"train.teacher_weights {train.teacher_weights} does not exist", "pass a file with the teacher's weights"
        )
    if train.teacher and not train.teacher_weights:
        check_source(Path(train.teacher), key="train.teacher ")
