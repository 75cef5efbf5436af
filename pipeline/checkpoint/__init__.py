"""Save and load checkpoints: atomic, verified on load, for any world size and any ZeRO stage.

``python -m pipeline.checkpoint inspect|verify|export RUN_DIR`` is the command.
"""

from typing import TYPE_CHECKING

from pipeline.lazy import lazy_names

if TYPE_CHECKING:
    from pipeline.checkpoint.folder import FOLDER, latest_step, saved_steps, step_folder, sweep
    from pipeline.checkpoint.loading import Verified, load, newest_intact
    from pipeline.checkpoint.manifest import CheckpointManifest, RunState
    from pipeline.checkpoint.saver import Saver
    from pipeline.checkpoint.weights import SavedWeights, read_initial_weights, read_weights

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    folder="FOLDER latest_step saved_steps step_folder sweep",
    loading="Verified load newest_intact",
    manifest="CheckpointManifest RunState",
    saver="Saver",
    weights="SavedWeights read_initial_weights read_weights",
)
