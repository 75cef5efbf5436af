"""Record what a run does, besides checkpoints.

==================== ===============================================================================================
``console.py``       the handler of the package's logger; progress lines
``run_log.py``       ``metrics.jsonl``: a row per step and per evaluation
``reduction.py``     what goes into a row from all ranks: metrics, bad samples, requests to a store
``tensorboard.py``   TensorBoard's event files: names and groups of curves, and the settings that HParams compares
``pictures.py``      its images: training batches, peripheral attention, accuracy by class
``run_files.py``     ``config.yaml`` and ``environment.json``: how it was started; ``events.jsonl``: what happened to it
``sample_log.py``    every sample that each rank trained on (``log.samples``)
``profiling.py``     steps under PyTorch's profiler (``log.profile_steps``)
==================== ===============================================================================================
"""
