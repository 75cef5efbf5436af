"""Compute which sample is at each position of training, and every number drawn for it: pure functions without I/O."""
