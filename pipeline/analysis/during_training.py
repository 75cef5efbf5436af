"""Measure how a model changes as it trains (``eval.analyses``), with each evaluation.

How far heads look (ConViT, Eq. 8; Fig. 5, 10 and 13), ConViT's gates (Fig. 6 and 14), and how far Φp reaches (PerViT, Eq. 13). All
come from forward passes of the engine, under ZeRO-3 too, over the first images of the validation set, in parts of a few, so that
attention maps need little memory. They are passes of their own: nothing of the evaluation, and nothing of the training, changes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.analysis.attention import AttentionChapter
from pipeline.analysis.measures import AttentionDistance, Collector, add_over_ranks, look, nonlocality, plain, unit_distances
from pipeline.cluster.world import World
from pipeline.config import Config
from pipeline.loader.loader import Batch
from pipeline.models.common.base import VisionModel
from pipeline.models.common.vit import patch_grid
from pipeline.optim.engine import Engine

IMAGES = 256  # of the validation set with eval.analyses=true, whatever the number of ranks and the batch size
_PART = 32  # images in a forward pass: ConViT-B's attention maps of 32 images are 80 MB for a layer
_IMAGE_DIMENSIONS = 4  # of what is of images, (B, heads, N, N)
_DIGITS = 6  # significant digits in metrics.jsonl


class _OfWeights(Collector):
    """What ``measure`` makes, (heads,), of a value (heads, ...) that a layer offers before ``attention``, whatever the image. Layers that
    do not offer it have None, as have those whose value is of images: iRPE's scores, which depend on the queries."""

    def __init__(self, probe: str, measure: Callable[[Tensor], Tensor]) -> None:
        super().__init__(probe, "attention")
        self._measure = measure
        self._values: dict[int, Tensor] = {}  # by layer

    def see(self, name: str, value: Tensor) -> None:
        if name == self.probes[0] and value.dim() < _IMAGE_DIMENSIONS and self.layer not in self._values:
            self._values[self.layer] = self._measure(value)

    def value(self) -> list[list[float | None] | None] | None:
        """[layer][head]; None if no layer offers it."""
        return plain([self._values.get(layer) for layer in range(self.layer)], _DIGITS) if self._values else None


class FirstImages:
    """Looks at the first images of an evaluation, :data:`IMAGES` unless ``count`` says how many. Called with each of its
    batches, on all ranks alike. ``forward``: (B, 3, H, W) -> anything; in eval mode. ``grid``: rows and columns of patches."""

    def __init__(
        self, forward: Callable[[Tensor], object], grid: tuple[int, int], world: World, count: int | bool = True
    ) -> None:
        self._forward, self._world = forward, world
        self._images = IMAGES if count is True else count
        self._distance = AttentionDistance(grid)
        self._gate = _OfWeights("gate", lambda gate: gate)
        self._phi_p = _OfWeights("phi_p", lambda phi: nonlocality(phi, unit_distances(*grid, phi.device)))
        self._collectors: list[Collector] = [self._distance, self._gate, self._phi_p]
        self._batches = 0
        self._count = torch.zeros((), dtype=torch.float64, device=world.device)

    @classmethod
    def of(cls, engine: Engine[VisionModel], config: Config, world: World) -> "FirstImages | None":
        """For one evaluation of a run; None if ``eval.analyses`` is off, or there is nothing to follow."""
        if not config.eval.analyses or nothing_to_follow(engine.module):
            return None
        size = config.model.image_size
        return cls(engine, patch_grid(size, size, engine.module.patch), world, config.eval.analyses)

    def __call__(self, batch: Batch, *results: object) -> None:
        first = self._batches * self._world.size * len(batch.images)  # of this batch, over all ranks
        self._batches += 1
        if first >= self._images:
            return
        valid = batch.valid & torch.from_numpy(batch.request.position < self._images).to(batch.valid.device)  # (B,)
        for images, counts in zip(batch.images.split(_PART), valid.split(_PART)):  # the same parts on all ranks
            look(self._forward, images, counts, self._collectors)
        self._count += valid.sum()

    def measures(self) -> dict[str, Any]:
        """What was found, as in ``analysis.json``; a key is missing where the model has no such value. ``mean_attention_distance``:
        [layer][head] in patches; ``nonlocality``: ``phi_p``, in coordinates of [-1, 1]; ``gate``: None for a layer without. Collective."""
        add_over_ranks(self._count, self._world, self._collectors)
        found: dict[str, Any] = {"mean_attention_distance": plain(self._distance.mean("distance"), _DIGITS)}
        if gate := self._gate.value():
            found["gate"] = gate
        if phi_p := self._phi_p.value():
            found["nonlocality"] = {"phi_p": phi_p}
        return found


def nothing_to_follow(model: nn.Module) -> str | None:
    """Why ``eval.analyses`` has nothing to write for a model; None if it has."""
    if isinstance(model, VisionModel) and AttentionChapter.applies(model):
        return None
    return "it follows the self-attention of DeiT, ConViT and PerViT over one grid of patches"


def layer_means(measures: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Means over heads, for curves: "mean_attention_distance/layer_01" -> number, "nonlocality/phi_p/layer_01" -> number."""
    curves: dict[str, float] = {}
    for name, layers in measures.items():
        if isinstance(layers, dict):
            curves |= layer_means(layers, f"{prefix}{name}/")
            continue
        for number, heads in enumerate(layers, start=1):
            if heads and None not in heads:
                curves[f"{prefix}{name}/layer_{number:02}"] = sum(heads) / len(heads)
    return curves
