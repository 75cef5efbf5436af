"""Shards, sample order, augmentation and the DALI loader. Knows nothing of training."""
