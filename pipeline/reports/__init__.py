"""Make pages about runs from what lies in their folders, which :mod:`pipeline.runs` reads; ``python -m pipeline.report`` is the command."""
