"""The model of runs of seconds."""

# A PerViT of 0.2 million parameters, which is 2 MB per checkpoint: every kind of layer, BatchNorm too, and stochastic depth.
SMALL_MODEL = ("model.switches={widths: [16, 16, 16, 16]}", "log.every_steps=1", "train.ema_decay=0.9")
