"""Let the ranks of a job meet, talk to each other and decide together; detect faults.

Elsewhere: checkpoints in ``pipeline.checkpoint``; non-finite gradients and requeueing in ``pipeline.training``.
"""
