"""A pretended GPU: PyPI's CUDA build of PyTorch believes that it has an H100, and every call to it is counted by name.

    python tests/pretended_gpu/run.py PROGRAM|-m MODULE ARGUMENTS

runs a program on it; inside of the program ``with counted() as counts:`` counts, see :class:`Counts`. ``build.py`` makes two
libraries of the C++ files: one that is loaded before all others and takes the place of CUDA's runtime, cuBLAS, cuDNN and NCCL, and a
driver for Triton. Kernels compute nothing, so that results are garbage: it shows that code runs, what it launches, copies and
waits for, not what comes out or how long it takes.
"""

from pretended_gpu.build import build, missing, variables
from pretended_gpu.counts import Counts, counted
