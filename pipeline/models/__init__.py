"""The model families, a registry that builds them by name, and their weights in this project's and the authors' layouts.

Where a paper and its authors' code differ, a family follows the code, so that ``load_reference_state_dict`` can load their
weights; each such place says so."""

from typing import TYPE_CHECKING

from pipeline.lazy import lazy_names

if TYPE_CHECKING:
    from pipeline.models.common.base import as_features
    from pipeline.models.registry import create_model, list_models, model_entry, model_of
    from pipeline.models.weights.reference_names import load_reference_state_dict, reference_state_dict
    from pipeline.models.weights.transfer import load_pretrained

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    **{
        "common.base": "as_features",
        "registry": "create_model list_models model_entry model_of",
        "weights.reference_names": "load_reference_state_dict reference_state_dict",
        "weights.transfer": "load_pretrained",
    },
)
