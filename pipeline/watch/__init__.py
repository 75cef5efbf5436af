"""The command ``pipeline.watch``: runs in a terminal, from their files alone.

================ =========================================================
``follow.py``    what a run folder tells, kept up to date by what is new in it
``screen.py``    that as a page, or as a line among several runs
``__main__.py``  the command
================ =========================================================
"""
