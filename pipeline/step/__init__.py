"""Take a training step; the one place that knows how: the training loop, the dry run, the trial of a micro-batch, the first try of
``torch.compile`` and the plan's trace all call it.
"""
