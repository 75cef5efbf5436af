"""Plan what a run will take, before it is submitted: memory per GPU, time per step, hours, storage. Nothing large is built.

====================== ================================================================================================
``memory.py``          what is planned; memory by part; the largest micro-batch that fits
``traced_step.py``     a training step and an evaluation on tensors without values, of which memory and time are made
``trace.py``           records live bytes and operators, and joins operators as a compiler does
``planned_machine.py`` the forms of the planned device in a trace; what DeepSpeed's engine and the optimizer hold
``time.py``            seconds of a step's parts, by the model or an earlier run; hours, jobs and money
``rates.py``           seconds of operators on a GPU and on this CPU, which it measures, and of collectives
``length.py``          images, steps, evaluations, checkpoints, Slurm jobs; what the loader takes
``page.py``            the page with its advice, and the JSON
====================== ================================================================================================
"""
