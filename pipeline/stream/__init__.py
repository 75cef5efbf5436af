"""Compute which sample is at each position of training, and every number drawn for it: pure functions without I/O.

=============  ===========================================================================
``philox``     a counter-based generator of random numbers
``order``      the permutation of an epoch, and the places of an image's views in a global batch
``samples``    what batches know of a split, and the order of several sets
``schedule``   the length of a run: steps, samples, epochs, evaluations
=============  ===========================================================================
"""
