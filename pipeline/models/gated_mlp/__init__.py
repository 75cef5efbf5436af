"""MLPs with spatial gating units: gMLP (Liu et al., NeurIPS 2021) and PosMLP (Wang et al., ACM MM 2022).

=================  ===========================================================
``gmlp``           gMLP, one window over the whole image
``posmlp``         PosMLP, a four-stage pyramid of windows
``posmlp_layers``  its stems, patch merging and absolute position embedding; its layout, and its ablation switches
``gating``         the gated block that both consist of, and its switches
``token_mixing``   the token-mixing maps: learned, or a Gaussian of the relative position
``partition``      windows that tile a grid, or pad one of any size
=================  ===========================================================
"""
