"""Run attention with kernels of its own, beneath the models: ``peripheral`` has the function that they call and chooses its form, in
``chunked`` for training on a CPU, or in Triton (``fused``, loaded where it is used, with its code in ``tiles`` and ``gradient_tiles``).
"""

from pipeline.kernels.peripheral import peripheral_attention as peripheral_attention
