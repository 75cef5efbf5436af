"""Run the command ``pipeline.watch`` (``__main__.py``): show runs in a terminal (``screen.py``), from their files alone."""
