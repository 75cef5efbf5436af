"""A training run, from its command line to its last step; the loop itself is ``pipeline.train``.

=================== =================================================================
``command.py``      the command line of ``pipeline.train``, before PyTorch is imported
``start.py``        start or resume: find the checkpoint, compare, build everything
``folder.py``       the run folder: may this config continue the run in it?
``run_keys.py``     which keys of a config a resumed run may change
``lock.py``         one run per folder
``precision.py``    bf16 or fp32
``determinism.py``  ``train.deterministic``
``compiling.py``    torch.compile of a step's parts; ``compile_cache.py``: where it keeps them
``decoding.py``     GPU or CPU decodes the images
``state.py``        ``Run``: everything that the training loop works with
``teacher.py``      loads the teacher of hard distillation
``evaluation.py``   exact evaluation, also for the command ``pipeline.evaluate``
``predictions.py``  the table of predictions, of ``pipeline.predict`` and ``pipeline.evaluate --predictions``
``nonfinite.py``    non-finite gradients: skip the step, or dump what reproduces it
=================== =================================================================
"""
