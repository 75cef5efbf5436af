"""LSAT (Sheynin et al., 2021).

=====================  ====================================================
``model``              the model, its ablation switches and registered sizes
``layout``             widths, heads and depths of the registered sizes
``blocks``             block, downsampling, and the modules of a level
``shifts``             shifted images and their patch embeddings
``grouped_attention``  attention within groups of tokens: local and global
``swin``  ``cvt``      what Table 6 has in place of the local block
=====================  ====================================================
"""
