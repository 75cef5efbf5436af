"""Optimization: what turns a loss into new weights.

==================== =========================================================================================
``description.py``   what the pipeline may ask about an optimizer
``adamw.py``         the answers for AdamW
``lamb.py``          LAMB, whichever ranks hold a parameter's slices
``muon.py``          Muon for the matrices of the blocks, AdamW for the rest
``imported.py``      any class of ``torch.optim.Optimizer``, which is tried on small parameters first
``build.py``         the optimizer of a config; parameter groups: weight decay, layer-wise learning rates
``learning_rate.py`` the learning rate of a step
``engine.py``        the DeepSpeed engine, its config, and the optimizer step
``slices.py``        what is used of DeepSpeed's engine; where it keeps what the optimizer updates
``averages.py``      exponential moving average of the weights; BatchNorm statistics per optimizer step, over all ranks
==================== =========================================================================================
"""
