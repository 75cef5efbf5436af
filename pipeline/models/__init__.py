"""Models by name. One file per family; ``registry`` holds the names."""

from pipeline.models import convit as _convit  # noqa: F401  (each registers its models)
from pipeline.models import deit as _deit  # noqa: F401
from pipeline.models import pervit as _pervit  # noqa: F401
from pipeline.models.registry import create_model, list_models, load_reference_state_dict, model_entry

__all__ = ["create_model", "list_models", "load_reference_state_dict", "model_entry"]
