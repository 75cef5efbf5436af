"""Make pages about runs from what lies in their folders, which :mod:`pipeline.runs` reads.

==================== ==========================================================================
``curves.py``        curves as plotly figures, thinned where they are long; the sections of a training's curves and speed
``run_page.py``      the page about one run: result and story; ``sections.py``: what lies beside the metrics
``predictions.py``   per-image results of ``pipeline.evaluate``; ``mistakes.py``: their section, with images
``comparison.py``    which runs differ only in their seed, in what the others differ; ``comparison_page.py``: their page
``papers.py``        the recipe that a config comes from; the papers' tables, ``tables/*.yml``
``row_runs.py``      which runs belong to a row of such a table
``table_sheet.py``   a table with ours beside it; ``table_formats.py``: as HTML, Markdown, LaTeX, CSV
==================== ==========================================================================

``python -m pipeline.report`` is the command.
"""
