"""Start a training run (``start.py``) and run its loop (``loop.py``)."""
