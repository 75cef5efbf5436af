"""What the chapters on peripheral attention share: the models they take, Φp of each layer, the query, the order of heads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pipeline.analysis.chapter import Chapter, Request
from pipeline.analysis.measures import nonlocality, query_key_distances
from pipeline.errors import UserError
from pipeline.models.common.base import VisionModel
from pipeline.models.common.vit import patch_grid
from pipeline.models.pervit.model import PerViT
from pipeline.models.pervit.phi_model import PhiModel

NO_PHI_P = "The model has no position-based attention (model.switches.phi_p=false)."
NO_PHI_C = (
    "The model has no content-based attention (model.switches.phi_c=false): its attention is Φp, the same for all images."
)
NO_IMAGES = "It needs images: pass --data."
NO_EXAMPLES = "It shows examples: pass --data and --examples."


class PeripheralChapter(Chapter):
    """Base of the chapters on PerViT and its ablations, and on DeiT with Φp.

    Attributes:
        grid: (rows, columns) of tokens; N = rows · columns.
        query: (row, column) of the token whose maps are shown; the centre as in the authors' code, (7, 7) of 14 x 14.
        has_phi_p, has_phi_c: whether the model has this attention; one that it lacks is 1 everywhere.
    """

    model: PhiModel

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.grid = patch_grid(request.image_size, request.image_size)
        self.query = request.query_on(self.grid)
        for place, size in zip(self.query, self.grid):
            if not 0 <= place < size:
                raise UserError(
                    f"--query is row {self.query[0]}, column {self.query[1]}, but the grid has {self.grid[0]} x {self.grid[1]} tokens",
                    f"give a row from 0 to {self.grid[0] - 1} and a column from 0 to {self.grid[1] - 1}",
                )
        self.has_phi_p = self.model.phi_design is not None
        self.has_phi_c = getattr(self.model.switches, "phi_c", True)

    @classmethod
    def applies(cls, model: VisionModel) -> bool:
        return isinstance(model, PerViT) or (isinstance(model, PhiModel) and model.phi_design is not None)

    @property
    def query_index(self) -> int:
        """Of the query among the N tokens, row by row."""
        return self.query[0] * self.grid[1] + self.query[1]

    @property
    def query_text(self) -> str:
        """For captions, counted from 0."""
        return f"row {self.query[0]}, column {self.query[1]} of the {self.grid[0]} x {self.grid[1]} tokens"

    @torch.no_grad()
    def phi_p(self) -> Iterator[Tensor]:
        """Φp of one layer after the other, (heads, N, N)."""
        for log_phi in self.model.log_phi(self.grid):
            assert log_phi is not None, NO_PHI_P
            yield log_phi.exp()

    def phi_p_nonlocality(self) -> Tensor:
        """Ωp, (layers, heads) float64 on the CPU, in patches (PerViT, Eq. 13)."""
        distances = query_key_distances(*self.grid, next(self.model.parameters()).device)
        return torch.stack([nonlocality(phi, distances) for phi in self.phi_p()]).cpu()

    def order(self) -> Tensor:
        """(layers, heads): the heads of each layer, the most local first, as the authors draw them (PerViT, Fig. 4)."""
        return self.phi_p_nonlocality().argsort(dim=1, stable=True)

    def query_maps(self) -> Tensor:
        """Φp of the query: (layers, heads, rows, columns), on the CPU, in the model's order of heads."""
        return torch.stack([phi[:, self.query_index].unflatten(1, self.grid) for phi in self.phi_p()]).cpu()


def rounded(values: Tensor, digits: int = 5) -> Any:
    """Nested lists with so many significant digits, for ``analysis.json``; None for what is not finite, which JSON cannot hold."""

    def convert(value: Any) -> Any:
        if isinstance(value, list):
            return [convert(each) for each in value]
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None

    return convert(values.tolist())


def finite(values: Tensor) -> Any:
    """Nested lists, in full precision; None for what is not finite."""
    return rounded(values, 17)


def reordered(values: Tensor, order: Tensor) -> Tensor:
    """(layers, heads, ...) with the heads of each layer in the given order (layers, heads)."""
    return torch.stack([layer[heads] for layer, heads in zip(values, order)])
