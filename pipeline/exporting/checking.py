"""Whether an export computes what the model does: scores of both for the same images."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pipeline.errors import UserError
from pipeline.exporting.subject import Subject

BATCHES = (1, 3)  # neither is the one that the graph was traced with
TOLERANCE = {
    "fp32": 1e-4,
    "fp16": 2e-2,
    "timm": 1e-5,
}  # largest difference of a score / largest score; timm: the same operators


def sample_images(image_size: int, batch: int) -> Tensor:
    """(batch, 3, S, S) from a normal distribution, the same each time."""
    generator = torch.Generator().manual_seed(batch)
    return torch.randn(batch, 3, image_size, image_size, generator=generator)


def compare(subject: Subject, run: Callable[[Tensor], Tensor], precision: str, of: str) -> float:
    """Compare scores for the batch sizes of ``BATCHES``.

    Args:
        subject: the model.
        run: the export, (B, 3, S, S) float32 -> (B, classes).
        precision: of the export, or ``timm``: its tolerance is in ``TOLERANCE``.
        of: what was exported, and what ran it, for the message.

    Returns:
        The largest difference of a score, relative to the largest score of its batch.

    Raises:
        UserError: it is above the tolerance, or a score is not finite.
    """
    worst = 0.0
    for batch in BATCHES:
        images = sample_images(subject.description.image_size, batch)
        with torch.inference_mode():
            expected = subject.model(images).double()
            found = run(images).double()
        if expected.shape != found.shape:
            raise UserError(f"{of} must give scores of shape {tuple(expected.shape)}, got {tuple(found.shape)}", _REMEDY)
        difference = ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-12)).item()
        if not difference <= TOLERANCE[precision]:  # NaN too
            raise UserError(
                f"{of} gives scores that differ from the model's by {difference:.1e} of the largest, at most "
                f"{TOLERANCE[precision]:.0e} allowed for {precision}, so that nothing was written",
                "try --precision fp32" if precision == "fp16" else _REMEDY,
            )
        worst = max(worst, difference)
    return worst


def checked(difference: float, precision: str, by: str) -> str:
    """A line for the card."""
    sizes = " and ".join(map(str, BATCHES))
    return (
        f"scores of batches of {sizes} differ from the model's by at most {difference:.1e} of the largest score in {by} "
        f"(allowed: {TOLERANCE[precision]:.0e})"
    )


_REMEDY = "export the weights with --format safetensors, and report this"
