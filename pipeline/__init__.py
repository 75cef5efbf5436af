"""PerViT Pipeline: from a folder of JPEGs to a trained, evaluated peripheral vision transformer.

Imports flow one way: ``errors``, ``config`` and ``philox`` stand alone; ``models`` builds on them
and knows nothing of ``data``; ``data`` knows nothing of training; ``train`` and ``evaluate`` use all.
"""

import warnings

if any(action == "error" for action, *_ in warnings.filters):
    # PYTHONWARNINGS=error would end every command in the middle of an import of PyTorch or DeepSpeed, which warn of each other.
    warnings.filterwarnings("default")
