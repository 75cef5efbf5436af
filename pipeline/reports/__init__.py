"""Make pages about runs from what lies in their folders, which :mod:`pipeline.runs` reads.

``run_folder.py``   a run folder as plain data, however incomplete, and what is missing in it
``metric_rows.py``  ``metrics.jsonl`` as columns
``tolerant.py``     small files, read as far as they can be
``story.py``        the starts of a run and how each of them ended
``paper.py``        the recipe that a config comes from, and its figure in the paper
``predictions.py``  per-image results of ``pipeline.evaluate``
``pictures.py``     images of the data set, by their keys
``curves.py``       curves as plotly figures, thinned where they are long
``known_runs.py``   several run folders, and what a comparison needs of each
``comparison.py``   which runs differ only in their seed, in what the others differ; ``comparison_page.py``: their page
``paper_tables.py`` the papers' tables, ``tables/*.yml``; ``row_runs.py``: which runs belong to a row
``table_sheet.py``  such a table with ours beside it; ``table_page.py``, ``table_formats.py``: as HTML, Markdown, LaTeX, CSV
``sections/``       the parts of the page about one run
``run_page.py``     that page, put together
=================== ==========================================================================
=======
==================== ==========================================================================
``curves.py``        curves as plotly figures, thinned where they are long
``run_page.py``      the page about one run, put together from ``sections/``
``predictions.py``   per-image results of ``pipeline.evaluate``, and their images
``comparison.py``    which runs differ only in their seed, in what the others differ; ``comparison_page.py``: their page
``papers.py``        the recipe that a config comes from; the papers' tables, ``tables/*.yml``
``row_runs.py``      which runs belong to a row of such a table
``table_sheet.py``   a table with ours beside it; ``table_formats.py``: as HTML, Markdown, LaTeX, CSV
==================== ==========================================================================

``python -m pipeline.report`` is the command.
"""
