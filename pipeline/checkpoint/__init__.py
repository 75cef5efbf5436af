"""Checkpoints: complete or invisible, verified when they are read, for any number of processes and any ZeRO stage.

=============== ===================================================================
``folder.py``   where they lie, how one is named to a command, which of them stay
``manifest.py`` the state of the run and checksums, validated when they are read
``whole.py``    comparing the files with their checksums, before they are read and after
``held.py``     which stretches of weights and optimizer state a process holds
``snapshot.py`` their copy in memory, for which alone the training waits
``parts.py``    the files: stretches by name
``saver.py``    writing beside the training, appearing all at once
``loading.py``  the newest whole one, into any engine
``weights.py``  plain state dicts, for evaluation and export
``coverage.py`` ``overview.py`` ``export.py``  the parts of the command
=============== ===================================================================

``python -m pipeline.checkpoint inspect|verify|export RUN_DIR`` looks at them from outside.
"""

from typing import TYPE_CHECKING

from pipeline.lazy import lazy_names

if TYPE_CHECKING:
    from pipeline.checkpoint.folder import FOLDER as FOLDER
    from pipeline.checkpoint.folder import CheckpointManifest as CheckpointManifest
    from pipeline.checkpoint.folder import RunState as RunState
    from pipeline.checkpoint.folder import latest_step as latest_step
    from pipeline.checkpoint.folder import saved_steps as saved_steps
    from pipeline.checkpoint.folder import step_folder as step_folder
    from pipeline.checkpoint.folder import sweep as sweep
    from pipeline.checkpoint.loading import load as load
    from pipeline.checkpoint.loading import newest_whole as newest_whole
    from pipeline.checkpoint.saver import Saver as Saver
    from pipeline.checkpoint.weights import SavedWeights as SavedWeights
    from pipeline.checkpoint.weights import read_initial_weights as read_initial_weights
    from pipeline.checkpoint.weights import read_weights as read_weights

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    folder="FOLDER CheckpointManifest RunState latest_step saved_steps step_folder sweep",
    loading="load newest_whole",
    saver="Saver",
    weights="SavedWeights read_initial_weights read_weights",
)
