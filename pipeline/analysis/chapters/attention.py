"""Self-attention of any family with a square grid of tokens (DeiT, DeiT III, ConViT, PerViT): how far heads look (ConViT, Eq. 8, Fig. 5)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipeline.analysis.averages import Collector
from pipeline.analysis.chapter import Chapter, Drawn, Findings, figure
from pipeline.analysis.measures import mean_attention_distance, query_key_distances
from pipeline.analysis.style import layer_head_plot
from pipeline.models.common.base import VisionModel
from pipeline.models.common.vit import patch_grid
from pipeline.models.convit import ConViT
from pipeline.models.deit import DeiT
from pipeline.models.deit3 import DeiT3
from pipeline.models.pervit.model import PerViT

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class AttentionDistance(Collector):
    """Mean attention distance of every layer and head, over images. A class token, as query and as key, is left out: it has no
    place; the rows of the rest are normalized again."""

    def __init__(self, grid: tuple[int, int]) -> None:
        super().__init__("attention")
        self.distances = query_key_distances(*grid)

    def see(self, name: str, value: Tensor) -> None:
        tokens = len(self.distances)
        self.distances = self.distances.to(value.device)
        patches = value[..., -tokens:, -tokens:]  # (B, heads, N, N) or (1, heads, N, N)
        per_image = torch.stack([self.distance(image) for image in patches])  # (B, heads): float64 of one image at a time
        self.add("distance", self.layer, per_image.expand(len(self.valid), -1))

    def distance(self, patches: Tensor) -> Tensor:
        """(heads, N, N) -> (heads,) float64."""
        patches = patches.double()
        return mean_attention_distance(patches / patches.sum(-1, keepdim=True), self.distances)


class AttentionChapter(Chapter):
    """Mean attention distance per layer and head."""

    @classmethod
    def applies(cls, model: VisionModel) -> bool:
        return isinstance(model, DeiT | DeiT3 | ConViT | PerViT)

    def make_collectors(self) -> list[Collector]:
        self._distance = AttentionDistance(patch_grid(self.request.image_size, self.request.image_size))
        return [self._distance]

    @figure(
        "attention_distance", "Mean attention distance", "ConViT, Eq. 8 and Fig. 5, at one time of the training", needs="images"
    )
    def _distances(self, findings: Findings) -> Drawn:
        distance, even = self._distance.mean("distance"), float(self._distance.distances.mean())
        findings.measure("mean_attention_distance", distance, "[layer][head], patches")
        return Drawn(
            "How far from the query a head looks: the mean distance of the patches that it attends to, weighted by the attention, in "
            f"patches, over all queries and {self.count:,} images. One bar per head. Attention spread evenly over "
            f"the grid gives {even:.2f} (dashed).",
            partial(_draw, distance, even),
        )


def _draw(distance: Tensor, even: float) -> Figure:
    figure = layer_head_plot(distance, "Distance in patches")
    figure.axes[0].axhline(even, color="black", linestyle="--", linewidth=0.8)
    return figure
