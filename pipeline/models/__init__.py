"""Models by name. One file per family; ``registry`` holds the names."""

from pipeline.models import gmlp as _gmlp  # noqa: F401
from pipeline.models import pervit as _pervit  # noqa: F401  (registers its models)
from pipeline.models import posmlp as _posmlp  # noqa: F401
from pipeline.models.registry import create_model, list_models, load_reference_state_dict, model_entry

__all__ = ["create_model", "list_models", "load_reference_state_dict", "model_entry"]
