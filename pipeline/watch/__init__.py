"""The command ``pipeline.watch``: show runs in a terminal, from their files alone.

================ =========================================================
``live.py``      a run folder with the curves of its metrics, kept up to date
``screen.py``    that as a page, or as a line among several runs
``__main__.py``  the command
================ =========================================================
"""
