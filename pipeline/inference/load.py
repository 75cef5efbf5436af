"""Load a trained model together with its input transform and class names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from pipeline.augment.crop import eval_geometry
from pipeline.inference.trained import read_trained
from pipeline.loader.cpu_transform import Normalization, resize_and_crop
from pipeline.models.common.base import VisionModel
from pipeline.models.weights.exported import Kind


class EvalTransform:
    """The evaluation transform: resize the short side, crop the centre, normalize.

    Args:
        image_size: S, side of the result in pixels.
        eval_crop: the short side is resized to S / eval_crop, rounded down.
        mean, std: per RGB channel, of pixels in [0, 1].
    """

    def __init__(self, image_size: int, eval_crop: float, mean: Sequence[float], std: Sequence[float]) -> None:
        self.image_size, self.eval_crop = image_size, eval_crop
        self._normalization = Normalization(mean, std)

    def __call__(self, image: Image.Image) -> Tensor:
        """Transform a PIL image to (3, S, S) float32. EXIF orientation is ignored, as in training."""
        if not isinstance(image, Image.Image):
            raise TypeError(f"the transform takes a PIL image, not {type(image).__name__}: open a file with PIL.Image.open.")
        pixels = np.array(image.convert("RGB"))  # (h, w, 3)
        geometry = eval_geometry(np.array(pixels.shape[:1]), np.array(pixels.shape[1:2]), self.image_size, self.eval_crop)
        (top, left), (height, width) = geometry.start[0], geometry.shape[0]
        window = torch.from_numpy(pixels[top : top + height, left : left + width])
        output = np.empty((3, self.image_size, self.image_size), dtype=np.float32)
        self._normalization.write(resize_and_crop(window, geometry, 0, self.image_size), output)
        return torch.from_numpy(output)


def load(
    source: Path | str, step: int | str | None = None, weights: Kind | None = None
) -> tuple[VisionModel, EvalTransform, list[str]]:
    """Load a trained model for inference::

        model, transform, classes = load("pervit_t.safetensors")
        with torch.inference_mode():
            scores = model(transform(Image.open("cat.jpg"))[None])[0]  # (classes,)

    Args:
        source: a file written by ``python -m pipeline.checkpoint export``, a run folder, or one of its checkpoints.
        step: the run's checkpoint, a step number or ``best``; None: the newest.
        weights: ``model`` or ``ema``; None: the averaged weights if the run kept them, else the model's. A file has one kind.

    Returns:
        model: (B, 3, S, S) -> (B, classes), in eval mode on the CPU.
        transform: PIL image -> (3, S, S).
        classes: class names in the order of the scores.

    Raises:
        UserError: ``source`` does not exist or is damaged, or its weights are not finite.
    """
    trained = read_trained(Path(source), step, weights)
    data = trained.config.data
    transform = EvalTransform(trained.config.model.image_size, data.eval_crop, data.mean, data.std)
    return trained.build_model(), transform, trained.shown
