"""Models by name. One file per family; ``registry`` holds the names."""

from pipeline.models import convit as _convit  # noqa: F401  (each registers its models)
from pipeline.models import deit as _deit  # noqa: F401
from pipeline.models import gmlp as _gmlp  # noqa: F401
from pipeline.models import lsat as _lsat  # noqa: F401
from pipeline.models import pervit as _pervit  # noqa: F401
from pipeline.models import posmlp as _posmlp  # noqa: F401
from pipeline.models.exported import load_exported
from pipeline.models.reference import load_reference_state_dict, reference_state_dict
from pipeline.models.registry import create_model, list_models, model_entry
from pipeline.models.transfer import load_pretrained

__all__ = [
    "create_model",
    "list_models",
    "load_exported",
    "load_pretrained",
    "load_reference_state_dict",
    "model_entry",
    "reference_state_dict",
]
