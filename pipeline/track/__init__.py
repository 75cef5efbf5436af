"""Run the command ``pipeline.track``: send a run's files to a tracker, by a process of its own beside the training.

A tracker's history cannot be taken back. So each history is a *segment*: where a resume rewinds the run, the segment ends and a new
one begins, with the rows that were kept. The segment with the highest number is equal to ``metrics.jsonl``.
"""
