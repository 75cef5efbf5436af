"""The teacher of a planned run (``train.teacher``), without weights."""

from __future__ import annotations

import importlib
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from pipeline.checkpoint.trained import read_trained
from pipeline.config import Config
from pipeline.errors import UserError
from pipeline.models import model_of


def fake_teacher(config: Config) -> tuple[nn.Module | None, str]:
    """The network that teaches, in eval mode on PyTorch's meta device.

    Returns:
        None if there is none, or if it is not at hand; and in the latter case a sentence that says why.
    """
    train = config.train
    if not train.teacher:
        return None, ""
    missing = "the teacher is not in the figures:"
    try:
        of = None if train.teacher_weights else _config_of(train.teacher)
    except UserError as error:
        return None, f"{missing} {error}"
    try:
        with torch.device("meta"):
            return (model_of(of) if of else _library_network(config)).eval(), ""
    except ImportError as error:
        return None, f"{missing} train.teacher is {train.teacher}, but {str(error).splitlines()[0]}"
    except Exception as error:  # of the library's own code, for a name that it does not have among others
        return None, f"{missing} {train.teacher} cannot be built ({(str(error).splitlines() or [type(error).__name__])[0]})"


@lru_cache(maxsize=8)
def _config_of(source: str) -> Config:
    return read_trained(Path(source)).config


def _library_network(config: Config) -> nn.Module:
    """As :mod:`pipeline.run.teacher` builds it, whose normalization of a batch is left out."""
    assert config.train.teacher
    library, _, name = config.train.teacher.partition(":")
    module = importlib.import_module(library)
    if library == "torchvision":
        return module.models.get_model(name, weights=None, num_classes=config.model.num_classes)
    return module.create_model(name, pretrained=False, num_classes=config.model.num_classes)
