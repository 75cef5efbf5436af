"""Analyze what a model has learned: the measures and figures of the papers, from any checkpoint (``python -m pipeline.analyze``).

============  ==========================================================================
``session``   one analysis, from a model (a run, an exported file, or fresh weights) to the files
``images``    those of the pass, chosen at random, and the examples
``survey``    what the weights alone show; the choice of figures by name
``measures``  nonlocality, impact, peripheral regions: functions of attention maps
``averages``  one pass over images: inner values, layer by layer, into running sums
``chapter``   how a family declares its figures, and what they give: numbers, figures, and what does not apply
``chapters``  one or more for each model family
``style``     figures that chapters share
``writing``   ``analysis.json``, figures as files, and the page
============  ==========================================================================
"""
