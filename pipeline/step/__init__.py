"""Take a training step, for the loop, the dry run, the trial of a micro-batch, ``torch.compile`` and the plan's trace."""
