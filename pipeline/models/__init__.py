"""Models by name. One file per family; ``registry`` holds the names."""

from typing import TYPE_CHECKING

from pipeline.lazy import lazy_names

if TYPE_CHECKING:
    from pipeline.checkpoint.inference import load as load
    from pipeline.models.registry import create_model as create_model
    from pipeline.models.registry import list_models as list_models
    from pipeline.models.registry import model_entry as model_entry
    from pipeline.models.weights.exported import load_exported as load_exported
    from pipeline.models.weights.reference_names import load_reference_state_dict as load_reference_state_dict
    from pipeline.models.weights.reference_names import reference_state_dict as reference_state_dict
    from pipeline.models.weights.transfer import load_pretrained as load_pretrained

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    **{
        "registry": "create_model list_models model_entry",
        "weights.exported": "load_exported",
        "weights.reference_names": "load_reference_state_dict reference_state_dict",
        "weights.transfer": "load_pretrained",
        ".checkpoint.inference": "load",
    },
)
