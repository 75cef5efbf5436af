"""Record what a run does, besides checkpoints.

======================== ====================================================================
``console.py``           the handler of the package's logger; progress lines
``run_log.py``           ``metrics.jsonl``: a row per step and per evaluation
``reduction.py``         metrics of all ranks, reduced to one row per step
``event_file.py``        TensorBoard scalars and images
``curves.py``            their names and groups, and the settings that HParams compares
``pictures.py``          those images: training batches, peripheral attention, accuracy by class
``run_files.py``         ``config.yaml`` and ``environment.json``: how it was started; ``events.jsonl``: what happened to it
``sample_log.py``        every sample that each rank trained on (``log.samples``)
``data_trouble.py``      bad samples, each reported once; failed requests to a store
======================== ====================================================================
"""
