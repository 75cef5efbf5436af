"""Evaluate and predict with trained weights.

=================  ===========================================================================
``load``           :func:`pipeline.load`: a trained model, its classes and its preprocessing
``trained``        a model from a checkpoint, an exported file or published weights
``evaluation``     exact evaluation: every image once over all ranks
``prediction``     what a model says of each image; ``predictions``, ``rank_rows``: the table of it
``image_list``     any images that a user names
=================  ===========================================================================
"""
