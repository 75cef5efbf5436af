"""Operators with kernels of their own, beneath the models.

==============  ===================================================================
``peripheral``  :func:`peripheral_attention` and the choice between its two forms
``plain``       the form in plain PyTorch
``fused``       the form in Triton, as an operator of PyTorch; loaded where it is used
``tiles``       its Triton code: forward, and in ``gradient_tiles`` backward
==============  ===================================================================
"""

from pipeline.kernels.peripheral import peripheral_attention as peripheral_attention
