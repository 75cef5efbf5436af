"""ConViT (d'Ascoli et al., ICML 2021).

=========  ===================================================
``model``  the model, its ablation switches and registered sizes
``gpsa``   (gated) positional self-attention
=========  ===================================================
"""
