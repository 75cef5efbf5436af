"""A trained model in one call, with what goes in and what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from pipeline.data.augment import eval_geometry
from pipeline.data.finish import Normalization, resize_and_crop
from pipeline.models.base import VisionModel
from pipeline.trained import read_trained


class EvalTransform:
    """What an evaluation does to an image: the short side is resized, the centre cropped, the pixels normalized.

    Args:
        image_size: S, side of the result in pixels.
        eval_crop: the short side becomes S / eval_crop.
        mean, std: per RGB channel, of pixels on [0, 1].
    """

    def __init__(self, image_size: int, eval_crop: float, mean: Sequence[float], std: Sequence[float]) -> None:
        self.image_size, self.eval_crop = image_size, eval_crop
        self._normalization = Normalization(mean, std)

    def __call__(self, image: Image.Image) -> Tensor:
        """(3, S, S) float32. EXIF orientation is ignored, as in training."""
        if not isinstance(image, Image.Image):
            raise TypeError(f"the transform takes a PIL image, not {type(image).__name__}: open a file with PIL.Image.open.")
        pixels = np.array(image.convert("RGB"))  # (h, w, 3)
        geometry = eval_geometry(pixels.shape[:1], pixels.shape[1:2], self.image_size, self.eval_crop)
        (top, left), (height, width) = geometry.start[0], geometry.shape[0]
        window = torch.from_numpy(pixels[top : top + height, left : left + width])
        output = np.empty((3, self.image_size, self.image_size), dtype=np.float32)
        self._normalization.write(resize_and_crop(window, geometry, 0, self.image_size), output)
        return torch.from_numpy(output)


def load(
    source: Path | str, step: int | str | None = None, weights: str | None = None
) -> tuple[VisionModel, EvalTransform, list[str]]:
    """A trained model, ready to be used::

        model, transform, classes = load("pervit_t.safetensors")
        with torch.inference_mode():
            scores = model(transform(Image.open("cat.jpg"))[None])[0]  # (classes,)

    Args:
        source: a file that ``python -m pipeline.checkpoint export`` wrote, a run folder, or one of its checkpoints.
        step: which checkpoint of a run, a number or ``best``; None: the newest.
        weights: ``model`` or ``ema``; None: the average where the run kept one, else the model's, or those of the file.

    Returns:
        The model, (B, 3, S, S) -> (B, classes), in eval mode on the CPU; what makes a (3, S, S) tensor of a PIL image;
        the name of the class that each score is for.

    Raises:
        UserError: there is no such thing, it is damaged, or its weights are not finite.
    """
    trained = read_trained(Path(source), step, weights)
    data = trained.config.data
    transform = EvalTransform(trained.config.model.image_size, data.eval_crop, data.mean, data.std)
    return trained.build_model(), transform, trained.classes
