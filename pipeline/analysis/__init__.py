"""What a model has learned: the measures and figures of the papers, from any checkpoint (``python -m pipeline.analyze``).

============  ==========================================================================
``subject``   the model that is analysed: a run, an exported file, or fresh weights
``measures``  nonlocality, impact, peripheral regions: functions of attention maps
``averages``  one pass over images: inner values, layer by layer, into running sums
``findings``  what a chapter gives: numbers, figures, and what does not apply
============  ==========================================================================
"""
