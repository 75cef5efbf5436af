"""What a run will take, before it is submitted: memory per GPU, time per step, hours, storage. Nothing large is built.

::

    subject.py    what is planned: a config on a number of nodes with GPUs of a kind
    memory.py     memory per GPU by part, and the largest micro-batch that fits
    page.py       the page and the JSON

Memory (``memory.py``): ``traced_step``, ``traced_evaluation``, ``teacher``, ``live_memory``, ``engine_memory``, ``gpu_forms``,
``loader_memory``, ``advice``.
Time (``time.py``, ``time_rows.py``, ``time_arguments.py``)::

    operators.py, fake_forms.py    what a step runs, on tensors without values
    roofline.py, machine.py        its seconds at the rates of a GPU, or of this CPU, which is measured
    network.py                     collectives by ZeRO stage
    schedule.py, storage.py        steps, evaluations, jobs; checkpoints
    loader_need.py, measured.py    the loader on the real shards; an earlier run in place of the model
"""
