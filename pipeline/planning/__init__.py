"""Plan what a run will take, before it is submitted: memory per GPU, time per step, hours, storage. Nothing large is built.

==================== =============================================================================================
``memory.py``        what is planned; memory by part; the largest micro-batch that fits
``traced_step.py``   a training step and an evaluation on tensors without values, of which memory and time are made
``trace.py``         records live bytes and operators; ``forms.py`` gives functions the form of the planned device
``engine_memory.py`` what DeepSpeed's engine and the optimizer hold
``time.py``          seconds of a step's parts, hours, jobs and money
``rates.py``         seconds of operators on a GPU and of collectives; ``machine.py`` measures this CPU and the loader
``length.py``        images, steps, evaluations, checkpoints, Slurm jobs
``measured.py``      an earlier run instead of the model of time
``page.py``          the page with its advice, and the JSON
==================== =============================================================================================
"""
