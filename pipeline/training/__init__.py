"""Start a training run and run its loop.

================== =====================================================================================
``loop.py``        the training loop
``settle.py``      settles what the config leaves open: precision, decoding, compiling, micro-batch
``precision.py``   bf16 or fp32; ``train.deterministic``
``micro_batch.py`` the largest micro-batch that fits, by a plan and a trial
``building.py``    builds the model in its engine, its first weights, the loader
``teacher.py``     loads the teacher of hard distillation
``start.py``       starts or resumes: finds the checkpoint, compares, settles, builds, opens the log
``dry_run.py``     a start that writes nothing, and a step on random images
``folder.py``      may this config continue the run in this folder?
``lock.py``        one run per folder
``restart.py``     whether the job script may requeue the job
``compiling.py``   compiles a step's parts with torch.compile
``state.py``       ``Run``: everything that the training loop works with
``nonfinite.py``   non-finite gradients: skips the step, or dumps what reproduces it
``profiling.py``   PyTorch's profiler for some steps
================== =====================================================================================
"""
