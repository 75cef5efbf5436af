"""An evaluation during training, with fake tensors: what is in memory when most is."""

from __future__ import annotations

from collections import Counter

import torch

from pipeline.config import Config
from pipeline.planning.traced_step import ACTIVATIONS, AVERAGE, IMAGES, fake_run, held_weights, scores_of

SWAPPED = "weights kept during an evaluation of the average"
_BATCHES = 2  # the second finds what the model keeps from batch to batch


def evaluation_memory(config: Config, world_size: int, stage: int, on_gpu: bool, kernels: bool) -> Counter[str]:
    """Trace an evaluation between two steps, of the average's weights where there is one.

    Args:
        config: with ``train.precision`` bf16 or fp32.
        world_size: number of processes.
        stage: of ZeRO that the run takes.
        on_gpu: operators as on a GPU, else as on a CPU.
        kernels: the Triton kernels run there.

    Returns:
        Bytes by part at the moment at which their sum is largest.
    """
    side, precision = config.model.image_size, config.train.precision
    with fake_run(config, world_size, stage, on_gpu, kernels) as (model, engine, live):
        model.eval()
        copies = []
        if config.train.ema_decay:
            copies = [live.new(held_weights(model, world_size, stage), label) for label in (AVERAGE, SWAPPED)]
        with torch.no_grad():
            for _ in range(_BATCHES):
                with live.labelled(IMAGES):
                    images = torch.empty(config.eval.batch_size, 3, side, side)
                engine.before_forward()
                with live.labelled(ACTIVATIONS):
                    scores = scores_of(model, images, None, precision).float()
                engine.after_forward()
                del images, scores
        del copies
        return +live.peak
