"""Take a training step; the one place that knows how.

================= =====================================================================================
``forward.py``    runs a model: autocast, the random numbers of a forward pass, a batch of random images
``loss.py``       computes the loss: labels that are mixed, and a teacher's
``train_step.py`` takes a step: micro-batches, gradients, optimizer, weight average, BatchNorm
================= =====================================================================================

The training loop, the dry run, the trial of a micro-batch, the first try of ``torch.compile`` and the plan's trace all call it.
"""
