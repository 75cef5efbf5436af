"""What a run writes into its folder besides checkpoints.

======================== ====================================================================
``run_files.py``         ``config.yaml`` and ``environment.json``: how it was started
``run_log.py``           ``metrics.jsonl`` and the console: a row per step and per evaluation
``event_file.py``        TensorBoard's curves and images
``pictures.py``          the images: training batches, peripheral attention
``sample_log.py``        every sample that each process trained on (``log.samples``)
``bad_sample_report.py`` images that could not be used, each named once
======================== ====================================================================
"""
