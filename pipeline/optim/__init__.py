"""Turn a loss into new weights: optimizers with a description each, the DeepSpeed engine, the weight average, BatchNorm."""
