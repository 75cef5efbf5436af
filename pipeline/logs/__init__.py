"""What a run records besides checkpoints.

======================== ====================================================================
``console.py``           the handler of the package's logger; progress lines
``run_log.py``           ``metrics.jsonl``: a row per step and per evaluation
``event_file.py``        TensorBoard scalars and images
``curves.py``            their names and groups
``hyperparameters.py``   what its HParams compares runs by
``pictures.py``          those images: training batches, peripheral attention, accuracy by class
``run_files.py``         ``config.yaml`` and ``environment.json``: how it was started
``run_events.py``        ``events.jsonl``: starts, evaluations, saves and ends, for reports
``sample_log.py``        every sample that each rank trained on (``log.samples``)
``bad_sample_report.py`` samples that cannot be used, each reported once
``hardware.py``          peak FLOP/s, bf16 support and memory of the device
======================== ====================================================================
"""
