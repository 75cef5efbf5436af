"""Checkpoints: atomic, verified on load, for any world size and any ZeRO stage.

=================== ================================================================
``saver.py``        saving in the background, publishing with one rename
``rank_slices.py``  which slices of weights and optimizer state a rank holds
``parts.py``        the safetensors files with these slices
``manifest.py``     ``checkpoint.json``: the run's state and checksums, validated
``folder.py``       folder layout, the choice of a checkpoint, retention
``loading.py``      the newest intact checkpoint, into any engine
``verification.py`` files against checksums; whether they cover everything exactly once
``weights.py``      plain state dicts, for evaluation and fine-tuning; export to one file
``trained.py``      a model from a run, a checkpoint or an exported file
``inference.py``    ``load``: a trained model in one call, with its transform and classes
``overview.py``     the text of ``inspect``
=================== ================================================================

``python -m pipeline.checkpoint inspect|verify|export RUN_DIR`` is the command.
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
    from pipeline.checkpoint.loading import Verified as Verified
    from pipeline.checkpoint.loading import load as load
    from pipeline.checkpoint.loading import newest_intact as newest_intact
    from pipeline.checkpoint.saver import Saver as Saver
    from pipeline.checkpoint.weights import SavedWeights as SavedWeights
    from pipeline.checkpoint.weights import read_initial_weights as read_initial_weights
    from pipeline.checkpoint.weights import read_weights as read_weights

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    folder="FOLDER CheckpointManifest RunState latest_step saved_steps step_folder sweep",
    loading="Verified load newest_intact",
    saver="Saver",
    weights="SavedWeights read_initial_weights read_weights",
)
