"""Run the command ``pipeline.sweep``: many runs from one file, a line of overrides each, on this machine or as a job array.

================== ============================================================
``lines.py``       the file: its lines, checked, and the folder of each run
``states.py``      how far each run is, and the page that compares them
``one_machine.py`` all runs on this machine, some at a time
``job_array.py``   all runs as a job array, the page as the job after it
``__main__.py``    the command; with --grid the file for all combinations of some values
================== ============================================================
"""
