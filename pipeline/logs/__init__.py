"""Record what a run does, besides checkpoints."""
