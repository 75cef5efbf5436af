"""The model families, a registry that builds them by name, and their weights in this project's and the authors' layouts.

==============  ===================================================================
``registry``    :func:`create_model` and the list of models
``deit``        DeiT
``deit3``       DeiT III
``pervit``      PerViT
``convit``      ConViT
``lsat``        LSAT
``gated_mlp``   gMLP and PosMLP
``timm_*``      models of timm: names, building, what they draw, the adapter
``common``      base class and layers that the families share
``weights``     published weights, transfer to other classes and sizes, exported files
``flops``       parameter and multiply-accumulate counts
``__main__``    ``python -m pipeline.models``
==============  ===================================================================
"""

from typing import TYPE_CHECKING

from pipeline.lazy import lazy_names

if TYPE_CHECKING:
    from pipeline.models.common.features import as_features
    from pipeline.models.registry import create_model, list_models, model_entry, model_of
    from pipeline.models.weights.exported import load_exported
    from pipeline.models.weights.reference_names import load_reference_state_dict, reference_state_dict
    from pipeline.models.weights.transfer import load_pretrained

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    **{
        "common.features": "as_features",
        "registry": "create_model list_models model_entry model_of",
        "weights.exported": "load_exported",
        "weights.reference_names": "load_reference_state_dict reference_state_dict",
        "weights.transfer": "load_pretrained",
    },
)
