"""Analyze what a model has learned: the measures and figures of the papers, from any checkpoint (``pervit analyze``)."""
