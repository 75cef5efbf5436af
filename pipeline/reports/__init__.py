"""Pages about runs, made from what lies in their folders.

=================== ==========================================================================
``run_folder.py``   a run folder as plain data, however incomplete, and what is missing in it
``metric_rows.py``  ``metrics.jsonl`` as columns
``tolerant.py``      small files, read as far as they can be
``page.py``         the frame of a page: one HTML file that opens without a network
=================== ==========================================================================

``python -m pipeline.report`` is the command.
"""
