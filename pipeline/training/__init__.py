"""Train a run: the loop, on top of what starts it (``pipeline.run``) and what a step does (``pipeline.step``)."""
