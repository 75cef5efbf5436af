"""Base class and layers shared by the model families.

============  ==========================================================================
``base``      :class:`VisionModel`: interface, stochastic depth, activation checkpointing
``features``  the feature form, without a classifier; position embeddings on any grid
``layers``    MLP, dropout, initialization, typed module lists, constant tables, windows of a token grid
``vit``       patch and position embedding, self-attention and block of a plain ViT
``irpe``      self-attention with image relative position encoding
``probe``     records inner values of a forward pass for analyses
============  ==========================================================================
"""
