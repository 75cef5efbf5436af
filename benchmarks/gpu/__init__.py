"""What a GPU does with this code, in one command: ``python -m benchmarks.gpu``, 25 minutes, or whatever time there is.

==================== =========================================================================
``cases.py``         what is measured, the most valuable first
``runner.py``        runs a case as processes of its own and receives its rows
``worker.py``        one of these processes
``record.py``        the record of a check; ``benchmarks/gpu_ledger`` collects them
``report.py``        rows as Markdown tables
``common.py``        what a case is told, and timing
``trace.py``         kernels, launches, synchronisations from PyTorch's profiler
``in_memory.py``     batches in memory in the loader's place
``machine.py``       stages ``machine``, ``exchange``: devices, versions, what they reach
``data.py``          stage ``data``: images and shards, made here
``loading.py``       stages ``decode``, ``loader``, ``pixels``
``steps.py``         stages ``step``, ``variant``, ``authors``: steps of the real training loop
``authors.py``       the authors' form of a step
``attention.py``     stage ``attention``: the operator beside other forms of it
``convolutions.py``  stage ``convolution``: each of a model's convolutions alone
``suite.py``         stages ``test``, ``compile_test``: the tests marked ``gpu``
==================== =========================================================================
"""
