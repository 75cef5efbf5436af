"""Run the command ``pipeline.sweep``: many runs from one file, a line of overrides each, on this machine or as a job array."""
