"""PerViT (Min et al., NeurIPS 2022).

=============  ===========================================================
``model``      the model, its ablation switches and registered sizes
``attention``  multi-head peripheral attention
``position``   the peripheral position encoding Φp of one layer
``phi_model``  base class of models with Φp: inputs that layers share, caching, Φp of all layers as one network
=============  ===========================================================
"""
