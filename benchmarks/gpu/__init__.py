"""What a GPU does with this code, in one command of at most 8 minutes: ``python -m benchmarks.gpu``.

================ ====================================================================
``stages.py``    the stages in their order, and how much time each has
``runner.py``    runs a stage as a process of its own and receives its rows
``worker.py``    that process
``report.py``    the rows as Markdown tables
``common.py``    what a stage is told, timing, which features are there
``data.py``      stage ``data``: images and shards, made here
``machine.py``   stage ``machine``: device and versions
``suite.py``     stage ``tests``: the tests marked ``gpu``
``attention.py`` stage ``attention``: the operator beside other forms of it
``steps.py``     stages ``steps_t``, ``steps_s``, ``steps_m``, ``deterministic``: steps of the real training loop
``authors.py``   the authors' form of a step, which those stages have beside them
``in_memory.py`` batches in memory in the loader's place
``trace.py``     launches, synchronisations and idle time from PyTorch's profiler
``loading.py``   stages ``loader`` and ``pixels``
``saving.py``    stage ``saving``: how long a checkpoint holds up a step
``faults.py``    stage ``faults``: a lost process, with NCCL
================ ====================================================================
"""
