"""Optimization: what turns a loss into new weights.

================ ===========================================================
``engine.py``    the DeepSpeed engine, its config, and the optimizer step
``adamw.py``     AdamW's parameter groups and the learning-rate schedule
``ema.py``       exponential moving average of the weights
``batchnorm.py`` BatchNorm statistics per optimizer step, over all ranks
================ ===========================================================
"""
