"""Lines of Python for a model card: from an image file to the input of a model, with nothing but Pillow and NumPy."""

from __future__ import annotations

from pipeline.exporting.subject import Subject


def graph_snippet(subject: Subject, runtime: str, run: str) -> str:
    """Five lines that load a graph and give the scores of an image.

    Args:
        subject: the model.
        runtime: the package that runs it.
        run: an expression of ``pixels``, (1, 3, S, S), for the scores, (classes,).
    """
    return "\n".join(
        [
            f"import numpy as np, {runtime}",
            "from PIL import Image, ImageOps",
            _image_line(subject),
            _pixels_line(subject),
            f"scores = {run}  # (classes,)",
        ]
    )


def _image_line(subject: Subject) -> str:
    """The evaluation's resize and crop as one step: the part of the image that remains, resized."""
    its = subject.description
    border = (1 - its.eval_crop) / 2
    cut = f", bleed={border:.6g}" if border else ""
    size = f"({its.image_size}, {its.image_size})"
    return f'image = ImageOps.fit(Image.open("cat.jpg").convert("RGB"), {size}, Image.Resampling.BICUBIC{cut})'


def _pixels_line(subject: Subject) -> str:
    """Normalization, and the layout of a batch of one: (1, 3, S, S) float32."""
    its = subject.description
    return f"pixels = ((np.asarray(image) / 255 - {its.mean}) / {its.std}).transpose(2, 0, 1)[None].astype(np.float32)"
