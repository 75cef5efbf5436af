"""PerViT Pipeline: from a folder of JPEGs to a trained, evaluated peripheral vision transformer. ARCHITECTURE.md has the layers."""

import warnings
from typing import TYPE_CHECKING

from pipeline.lazy import lazy_names

if TYPE_CHECKING:
    from pipeline.inference.trained import load as load

__getattr__, __dir__, __all__ = lazy_names(__name__, **{"inference.trained": "load"})

if any(action == "error" for action, *_ in warnings.filters):
    # PYTHONWARNINGS=error would end every command in the middle of an import of PyTorch or DeepSpeed, which warn of each other.
    warnings.filterwarnings("default")
