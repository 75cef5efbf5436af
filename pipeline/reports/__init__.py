"""Make pages about runs from what lies in their folders, which :mod:`pipeline.runs` reads; ``pervit report`` is the command."""
