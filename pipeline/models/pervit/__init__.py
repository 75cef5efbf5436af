"""PerViT (Min et al., NeurIPS 2022)."""
