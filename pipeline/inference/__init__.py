"""Load trained weights, evaluate them, and predict with them; ``load.py`` has :func:`pipeline.load`."""
