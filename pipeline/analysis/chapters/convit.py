"""ConViT (d'Ascoli et al., ICML 2021): gates, where position and content look, attention on images.

How far heads look (Eq. 8; Fig. 5 and 13) is in :mod:`pipeline.analysis.chapters.attention`. Layers with gated positional
self-attention (GPSA) have no class token; the attention that the others pay to it is not shown, as in the paper.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeline.analysis.averages import Collector
from pipeline.analysis.chapter import Chapter, Example
from pipeline.analysis.chapters import convit_figures as figures
from pipeline.analysis.chapters.attention import NO_IMAGES
from pipeline.analysis.findings import Findings, Plot
from pipeline.analysis.measures import mean_attention_distance, query_key_distances
from pipeline.models.common.base import VisionModel
from pipeline.models.common.probe import recorded
from pipeline.models.common.vit import ViTLayout, patch_grid
from pipeline.models.convit.gpsa import GatedPositionalSelfAttention, PositionalSelfAttention, relative_positions
from pipeline.models.convit.model import ConViT, ConViTSwitches

LOCALITY_STRENGTHS = (0.1, 0.3, 1.0, 3.0)  # α of the initial maps that are shown; 1 is the paper's choice
_DIGITS = 4  # significant digits of maps in analysis.json
_NO_GPSA = "model.switches.gpsa_layers is 0: a plain ViT has no positional attention."


class QueryMaps(Collector):
    """Attention of one query to all patches, mean over images: ``mean("maps")`` is (layers, heads, N).

    Args:
        query: number of the patch, row by row.
        tokens: N, patches of an image; tokens before them (class token) are left out.
    """

    def __init__(self, query: int, tokens: int) -> None:
        super().__init__("attention")
        self.query, self.tokens = query, tokens

    def see(self, name: str, value: Tensor) -> None:
        self.add("maps", self.layer, _row(value, self.query, self.tokens).expand(len(self.valid), -1, -1))


class ConViTChapter(Chapter):
    """Figures of ConViT, and of its ablations as far as they apply."""

    model: ConViT

    @classmethod
    def applies(cls, model: VisionModel) -> bool:
        return isinstance(model, ConViT)

    def collectors(self) -> list[Collector]:
        self._grid = patch_grid(self.request.image_size, self.request.image_size)
        self._query = self.request.query_on(self._grid)
        self._number = self._query[0] * self._grid[1] + self._query[1]
        self._maps = QueryMaps(self._number, self._grid[0] * self._grid[1])
        return [self._maps]

    def add_findings(self, findings: Findings) -> None:
        self._add_gates(findings)
        self._add_images(findings)
        self._add_average(findings)
        self._add_positions(findings)
        self._add_initialization(findings)

    def _add_gates(self, findings: Findings) -> None:
        """Fig. 6 and 14 at this checkpoint."""
        self._gates = gates(self.model)
        findings.measure("gate", self._gates, "[layer][head], share of position in [0, 1]; null: a layer without gates")
        switches = self.model.switches
        frozen = None if switches.train_gating else "model.switches.train_gating is false: all gates are frozen at 0.5."
        if not switches.train_gpsa:
            frozen = "model.switches.train_gpsa is false: all gates are frozen at their initial value."
        without = (
            "model.switches.positional_gating is false: content and position are summed before the softmax, without a gate."
        )
        reason = _NO_GPSA if self.model.gpsa_layers == 0 else without if not switches.positional_gating else frozen
        if reason:
            findings.omitted["gates"] = reason
            return
        findings.plots.append(
            Plot(
                "gates",
                "How much heads attend by position",
                "The gate σ(λ) of each head: 1 attends by position alone, 0 by content alone. All begin at 0.73 (dashed). Layers without "
                "bars are plain self-attention.",
                "ConViT, Fig. 6 and 14",
                partial(figures.gates, self._gates, positional_layers(self.model)[0].heads),
            )
        )

    def _add_images(self, findings: Findings) -> None:
        """Fig. 7, 16 and 17."""
        if not self.request.examples:
            findings.omitted["attention_maps"] = "It shows examples: pass --examples." if self._maps.count else NO_IMAGES
            return
        shown = []
        for number, example in enumerate(self.request.examples, start=1):
            maps = self._maps_of(example)  # (layers, heads, rows, columns)
            shown.append(_numbers(maps))
            findings.plots.append(
                Plot(
                    f"attention_maps_{number}",
                    f"Attention on {example.label} ({example.key})",
                    "Attention of the marked patch to all patches, one row per layer, one column per head, on a logarithmic scale. The number "
                    "above a map is its head's gate, from white (content) to red (position); layers without are plain self-attention, whose "
                    "attention to the class token is not shown.",
                    "ConViT, Fig. 7, 16 and 17",
                    partial(figures.attention_maps, maps, self._gates, self._query, example.pixels),
                )
            )
        findings.measure("attention_maps", shown, _unit("", self._query, "[example][layer][head]"))

    @torch.no_grad()
    def _maps_of(self, example: Example) -> Tensor:
        with recorded("attention") as values:
            self.model(example.image[None])
        tokens = self._grid[0] * self._grid[1]
        return torch.cat([_row(value, self._number, tokens) for value in values["attention"]]).unflatten(-1, self._grid).cpu()

    def _add_average(self, findings: Findings) -> None:
        """Fig. 15."""
        if self._maps.count == 0:
            findings.omitted["average_maps"] = NO_IMAGES
            return
        maps = self._maps.mean("maps").unflatten(-1, self._grid)  # (layers, heads, rows, columns)
        findings.measure("average_attention", _numbers(maps), _unit("mean over the images, ", self._query))
        findings.plots.append(
            Plot(
                "average_maps",
                f"Attention averaged over {self._maps.count:,} images",
                "Attention of the marked patch to all patches, mean over the images, which leaves what does not depend on their content. One "
                "row per layer, one column per head, on a logarithmic scale; the numbers are gates, from white (content) to red (position).",
                "ConViT, Fig. 15",
                partial(figures.attention_maps, maps, self._gates, self._query),
            )
        )

    def _add_positions(self, findings: Findings) -> None:
        """The positional term of Eq. 7 alone."""
        names = ("position_maps", "position_distance")
        if self.model.gpsa_layers == 0:
            findings.omitted |= dict.fromkeys(names, _NO_GPSA)
            return
        maps = positions(self.model, self._grid)  # (GPSA layers, heads, N, N)
        distances = mean_attention_distance(maps, query_key_distances(*self._grid))  # (GPSA layers, heads)
        plain = [None] * (len(self.model.blocks) - self.model.gpsa_layers)
        found = [*distances.tolist(), *plain]
        findings.measure("position_distance", found, "[layer][head], patches; null: a layer without position")
        findings.plots.append(
            Plot(
                "position_distance",
                "How far position looks",
                "Mean distance from the query to where a head's positional term attends (Eq. 8, for the second term of Eq. 7), in patches, "
                "edges of the image included. The dashed line is the initialization's; layers without bars are plain self-attention.",
                "ConViT, Fig. 5 and 13, for the positional term",
                partial(figures.position_distance, found, maps.shape[1], self._initial_distance()),
            )
        )
        shown = maps[:, :, self._number].unflatten(-1, self._grid)  # (GPSA layers, heads, rows, columns)
        findings.measure("position_maps", _numbers(shown), _unit("", self._query))
        findings.plots.append(
            Plot(
                "position_maps",
                "Where position looks",
                "The positional term's attention from the marked patch, the same for all images: one row per GPSA layer, one column per head, on "
                "a logarithmic scale. Numbers are gates, from white (the term is not used) to red (nothing else is).",
                "ConViT, Fig. 3, after training",
                partial(figures.attention_maps, shown, self._gates, self._query),
            )
        )

    def _initial_distance(self) -> float | None:
        if not self.model.switches.conv_init:
            return None
        heads = positional_layers(self.model)[0].heads
        maps = initial_positions(heads, self._grid, self.model.switches.locality_strength)
        return float(mean_attention_distance(maps, query_key_distances(*self._grid)).mean())

    def _add_initialization(self, findings: Findings) -> None:
        """Fig. 3."""
        name = "initial_positions"
        if self.model.gpsa_layers == 0 or not self.model.switches.conv_init:
            random = "model.switches.conv_init is false: positions begin at random."
            findings.omitted[name] = random if self.model.gpsa_layers else _NO_GPSA
            return
        heads = positional_layers(self.model)[0].heads
        rows = {f"α = {strength:g}": initial_positions(heads, self._grid, strength) for strength in LOCALITY_STRENGTHS}
        shown = {label: maps[:, self._number].unflatten(-1, self._grid) for label, maps in rows.items()}
        if self.request.examples:
            shown = {"content": self._untrained_content(self.request.examples[0]), **shown}
        numbers = {label.replace("α = ", "alpha_"): _numbers(maps) for label, maps in shown.items()}
        findings.measure(
            "initial_positions", numbers, _unit("", self._query, "locality strength, or untrained content -> [head]")
        )
        findings.plots.append(
            Plot(
                name,
                "Initialized as a convolution",
                "Positional attention of the marked patch before training (Eq. 5): each head looks at one offset of the kernel, the more "
                "sharply the larger the locality strength α. Each row has a scale of its own, from 0 to its largest value."
                + (" Above, an untrained self-attention layer, which sees the image's content." if "content" in shown else ""),
                "ConViT, Fig. 3",
                partial(figures.initial_positions, shown, self._query, [each.pixels for each in self.request.examples[:1]]),
                more_with_images="content" not in shown,
            )
        )

    @torch.no_grad()
    def _untrained_content(self, example: Example) -> Tensor:
        """(heads, rows, columns): attention of an untrained SA layer to an image, Fig. 3 b."""
        attention = positional_layers(self.model)[0]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layout = ViTLayout(attention.heads, attention.proj.out_features, depth=1)
            fresh = ConViT(
                layout, num_classes=1, image_size=self.request.image_size, switches=ConViTSwitches(gpsa_layers=0)
            ).eval()
        with recorded("attention") as values:
            fresh(example.image[None].float().cpu())
        return _row(values["attention"][0], self._number, self._grid[0] * self._grid[1])[0].unflatten(-1, self._grid)


def positional_layers(model: ConViT) -> list[PositionalSelfAttention]:
    """The attention of the leading layers that have positional attention, with or without gates."""
    return [block.attn for block in model.blocks if isinstance(block.attn, PositionalSelfAttention)]


def gates(model: ConViT) -> list[list[float] | None]:
    """[layer][head]: the gates as they are applied, σ(λ) of Eq. 7 or a mask; None for a layer without."""
    attentions = [block.attn for block in model.blocks]
    return [each.gate().tolist() if isinstance(each, GatedPositionalSelfAttention) else None for each in attentions]


@torch.no_grad()
def positions(model: ConViT, grid: tuple[int, int]) -> Tensor:
    """The positional term softmax(v r) of Eq. 7 in each GPSA layer: (GPSA layers, heads, N, N) on the CPU."""
    like = model.drop_path_rates
    offsets = relative_positions(*grid, like.device, like.dtype)  # (N, N, 3)
    return torch.stack([each.position_scores(offsets).softmax(-1) for each in positional_layers(model)]).cpu()


@torch.no_grad()
def initial_positions(heads: int, grid: tuple[int, int], strength: float) -> Tensor:
    """The positional term at initialization (Eq. 5) with a locality strength: (heads, N, N)."""
    attention = PositionalSelfAttention(heads, heads).double()
    torch.nn.init.zeros_(attention.position_projection.weight)  # of heads beyond the largest square, which attend to all alike
    torch.nn.init.zeros_(attention.position_projection.bias)
    attention.init_convolution(strength)
    return attention.position_scores(relative_positions(*grid, torch.device("cpu"), torch.float64)).softmax(-1)


def _row(attention: Tensor, query: int, tokens: int) -> Tensor:
    """Attention of a patch to all patches: (B, heads, M, M), M >= N -> (B, heads, N); what comes before the patches is left out."""
    return attention[..., -tokens:, -tokens:][..., query, :]


def _unit(what: str, query: tuple[int, int], first: str = "[layer][head]") -> str:
    return f"{first}[row][column], {what}attention of the patch at row {query[0]}, column {query[1]}, counted from 0"


def _numbers(maps: Tensor) -> Any:
    """Nested lists of few digits, so that the file stays small."""

    def short(item: Any) -> Any:
        return [short(each) for each in item] if isinstance(item, list) else float(f"{item:.{_DIGITS}g}")

    return short(maps.tolist())
