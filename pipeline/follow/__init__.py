"""The command ``pipeline.follow``: a run's files sent to a tracker, by a process of its own beside the training.

===================== ===========================================================================
``run_files.py``      what a run folder tells: rows, events, config; where a resume rewound it
``pictures.py``       its pictures, from TensorBoard's event files
``tracker.py``        what is sent, under which names; what a tracker must offer
``position.py``       what has been sent, in a file that outlives this process
``sending.py``        the loop: read, note, send; again after any failure
``to_wandb.py``       Weights & Biases         ``wandb_file.py``  what its offline files hold
``to_mlflow.py``      MLflow                   ``to_trackio.py``  Trackio
``__main__.py``       the command
===================== ===========================================================================

A tracker's history cannot be taken back. So each history is a *segment*: where a resume rewinds the run, the segment ends and a new
one begins, with the rows that were kept. The segment with the highest number is equal to ``metrics.jsonl``.
"""
