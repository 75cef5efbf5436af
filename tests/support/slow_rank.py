"""Train as ``pipeline.train`` does, with PERVIT_SLEEP more seconds in each backward pass: in a hook, between its collectives."""

from __future__ import annotations

import os
import time
from typing import Any

from torch import Tensor

from pipeline import train
from pipeline.step import train_step

forward_backward = train_step.forward_backward


def sleep(_gradient: Tensor) -> None:
    time.sleep(float(os.environ["PERVIT_SLEEP"]))


def slow_forward_backward(forward: Any, backward: Any, *more: Any) -> Tensor:
    def slow(loss: Tensor) -> None:
        loss.register_hook(sleep)
        backward(loss)

    return forward_backward(forward, slow, *more)


def main() -> int:
    train_step.forward_backward = slow_forward_backward
    return train.main()
