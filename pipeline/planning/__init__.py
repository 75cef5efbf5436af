"""What a run will take, before it is submitted: memory per GPU, time per step, hours, storage. Nothing large is built.

::

    subject.py    what is planned: a config on a number of nodes with GPUs of a kind
    gpus.py       the kinds of GPU and their figures
    memory.py     memory per GPU by part, and the largest micro-batch that fits
    page.py       the page and the JSON
"""
