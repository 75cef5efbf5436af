"""LSAT (Sheynin et al., 2021).

==========  =====================================================================
``model``   the model, its ablation switches and registered sizes
``blocks``  attention within groups of tokens, block, downsampling, and the modules of a level
``shifts``  shifted images and their patch embeddings; widths, heads and depths of the registered sizes
``table6``  what Table 6 has instead of the local block, of Swin and of CvT
==========  =====================================================================
"""
