"""MLPs with spatial gating units: gMLP (Liu et al., NeurIPS 2021) and PosMLP (Wang et al., ACM MM 2022)."""
