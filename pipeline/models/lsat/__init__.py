"""LSAT (Sheynin et al., 2021)."""
