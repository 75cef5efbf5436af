"""Save and load checkpoints: atomic, verified on load, for any world size and any ZeRO stage; and the command for them."""
