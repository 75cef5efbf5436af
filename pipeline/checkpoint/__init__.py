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

from pipeline.checkpoint.folder import FOLDER, Manifest, RunState, latest_step, saved_steps, step_folder, sweep
from pipeline.checkpoint.loading import load, newest_whole
from pipeline.checkpoint.saver import Saver
from pipeline.checkpoint.weights import SavedWeights, read_initial_weights, read_weights

__all__ = [
    "FOLDER",
    "Manifest",
    "RunState",
    "SavedWeights",
    "Saver",
    "latest_step",
    "load",
    "newest_whole",
    "read_initial_weights",
    "read_weights",
    "saved_steps",
    "step_folder",
    "sweep",
]
