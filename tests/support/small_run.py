"""The model of runs of seconds."""

# A PerViT of 0.1 million parameters and a block for each stage: every kind of layer, BatchNorm too, and stochastic depth.
SMALL_MODEL = ("model.switches={widths: [16, 16, 16, 16], depths: [1, 1, 1, 1]}", "log.every_steps=1", "train.ema_decay=0.9")
