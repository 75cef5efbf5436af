"""Optimization: what turns a loss into new weights.

====================== ===========================================================
``engine.py``          the DeepSpeed engine, its config, and the optimizer step
``engine_protocol.py`` what is used of DeepSpeed's engine
``adamw.py``           the config's optimizer, and the learning-rate schedule
``groups.py``          parameter groups: weight decay, layer-wise learning rates
``lamb.py``            LAMB, whichever ranks hold a parameter's slices
``muon.py``            Muon for the matrices of the blocks, AdamW for the rest
``slices.py``          where the engine keeps what the optimizer updates
``ema.py``             exponential moving average of the weights
``batchnorm.py``       BatchNorm statistics per optimizer step, over all ranks
====================== ===========================================================
"""
