"""Share a base class, layers, position embeddings and probes between the model families."""
