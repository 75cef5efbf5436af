"""timm's classifiers as models of ours, and its names."""
