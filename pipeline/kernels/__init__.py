"""Run attention with kernels of its own, beneath the models.

==============  ====================================================================================
``peripheral``  :func:`peripheral_attention`, its form in plain PyTorch, and the choice between the two
``chunked``     trains on a CPU a few images at a time, whose scores stay in a cache
``fused``       the form in Triton, as an operator of PyTorch; loaded where it is used
``tiles``       its Triton code: forward, and in ``gradient_tiles`` backward
==============  ====================================================================================
"""

from pipeline.kernels.peripheral import peripheral_attention as peripheral_attention
