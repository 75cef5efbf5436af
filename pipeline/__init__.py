"""PerViT Pipeline: from a folder of JPEGs to a trained, evaluated peripheral vision transformer. ARCHITECTURE.md has the layers."""

import os
import warnings
from typing import TYPE_CHECKING

from pipeline.lazy import lazy_names

if TYPE_CHECKING:
    from pipeline.inference.trained import load as load
    from pipeline.loader.image_loader import ImageBatch as ImageBatch
    from pipeline.loader.image_loader import ImageLoader as ImageLoader

__getattr__, __dir__, __all__ = lazy_names(
    __name__, **{"inference.trained": "load", "loader.image_loader": "ImageBatch ImageLoader"}
)

# PyTorch 2.13 replaces some products, such as one of a column and a row, by Triton kernels of its own, read when it is imported. On a
# machine without a C compiler or Python.h these end a backward pass, and they round unlike the products of a machine without Triton.
os.environ.setdefault("TORCH_DISABLE_NATIVE_JIT", "1")
if os.environ.get("WORLD_SIZE", "1") != "1":  # when a rank dies, PyTorch prints a C++ traceback on each of the others
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
if any(action == "error" for action, *_ in warnings.filters):
    # PYTHONWARNINGS=error would end every command in the middle of an import of PyTorch or DeepSpeed, which warn of each other.
    warnings.filterwarnings("default")
