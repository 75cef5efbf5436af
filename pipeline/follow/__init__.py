"""The command ``pipeline.follow``: send a run's files to a tracker, by a process of its own beside the training.

===================== ===========================================================================
``run_files.py``      the rows of a run folder that are new; where a resume rewound it
``tracker.py``        what is sent, under which names; what a tracker must offer
``position.py``       what has been sent, in a file that outlives this process
``sending.py``        the loop: read, note, send; again after any failure
``to_wandb.py``       Weights & Biases
``to_mlflow.py``      MLflow                   ``to_trackio.py``  Trackio
``__main__.py``       the command
===================== ===========================================================================

A tracker's history cannot be taken back. So each history is a *segment*: where a resume rewinds the run, the segment ends and a new
one begins, with the rows that were kept. The segment with the highest number is equal to ``metrics.jsonl``.
"""
