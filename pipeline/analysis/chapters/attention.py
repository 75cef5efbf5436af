"""Self-attention of any family with a square grid of tokens (DeiT, ConViT, PerViT): how far heads look (ConViT, Eq. 8, Fig. 5)."""

from __future__ import annotations

from torch import Tensor

from pipeline.analysis.averages import Collector
from pipeline.analysis.chapter import Chapter
from pipeline.analysis.findings import Findings
from pipeline.analysis.measures import mean_attention_distance, query_key_distances
from pipeline.models.common.base import VisionModel
from pipeline.models.common.vit import patch_grid
from pipeline.models.convit.model import ConViT
from pipeline.models.deit import DeiT
from pipeline.models.pervit.model import PerViT


class AttentionDistance(Collector):
    """Mean attention distance of every layer and head, over images. A class token, as query and as key, is left out: it has no
    place; the rows of the rest are normalized again."""

    def __init__(self, grid: tuple[int, int]) -> None:
        super().__init__("attention")
        self.distances = query_key_distances(*grid)

    def see(self, name: str, value: Tensor) -> None:
        tokens = len(self.distances)
        patches = value[..., -tokens:, -tokens:]  # (B, heads, N, N) or (1, heads, N, N)
        patches = patches / patches.sum(-1, keepdim=True)
        self.distances = self.distances.to(value.device)
        self.add("distance", self.layer, mean_attention_distance(patches, self.distances).expand(len(self.valid), -1))


class AttentionChapter(Chapter):
    """Mean attention distance per layer and head."""

    @classmethod
    def applies(cls, model: VisionModel) -> bool:
        return isinstance(model, DeiT | ConViT | PerViT)

    def collectors(self) -> list[Collector]:
        self._distance = AttentionDistance(patch_grid(self.request.image_size, self.request.image_size))
        return [self._distance]

    def add_findings(self, findings: Findings) -> None:
        if self._distance.count == 0:
            findings.omitted["attention_distance"] = "needs images: pass --data"
            return
        findings.measure("mean_attention_distance", self._distance.mean("distance"), "[layer][head], patches")
