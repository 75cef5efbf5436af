"""Load trained weights, evaluate them, and predict with them; ``trained.py`` has :func:`pipeline.load`."""
