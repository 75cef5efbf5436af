"""PerViT's training step in the form of the authors' published code: same parameters, same function, other operators.

What differs (read from github.com/juhongm999/pervit; the code here is our own):

- Φp: the scaled distances R are built for all 18 x 18 queries and keys with their 4 * heads channels; each layer cuts the queries
  out and runs its convolutions, group norms with one channel a group, ReLU and sigmoid on them;
- attention: exp(scores - maximum) * Φp, divided by its row sums, with every (N, N) matrix of every image written out;
- the stem in the layout of the images;
- AdamW parameter by parameter or by lists of them (PyTorch's default), cross entropy of targets with all classes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.models.pervit.model import ConvStem, PeripheralAttention, PerViT
from pipeline.models.pervit.position import NORM_EPS, PeripheralPosition, position_distances


class AuthorsStem(ConvStem):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.projection(x)


class AuthorsPosition(PeripheralPosition):
    """``forward``: R (N, 4 * heads, H + 4, W + 4) -> Φp (1, heads, N, N)."""

    def forward(self, r: Tensor) -> Tensor:  # type: ignore[override]
        r = self.projection1._conv_forward(r, self.projection1.weight, self.projection1.bias)
        r = F.relu(F.group_norm(r, r.shape[1], self.norm1.weight, self.norm1.bias, NORM_EPS), inplace=True)
        r = self.projection2(r)
        r = F.group_norm(r, r.shape[1], self.norm2.weight, self.norm2.bias, NORM_EPS)
        return r.flatten(2).transpose(0, 1)[None].sigmoid()


class AuthorsAttention(PeripheralAttention):
    def forward(self, x: Tensor, phi: Tensor) -> Tensor:  # type: ignore[override]
        batch, tokens, width = x.shape
        heads = [part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)]
        q, k, v = heads  # (B, heads, N, head_dim) each
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5  # (B, heads, N, N)
        weights = phi * (scores - scores.max(-1, keepdim=True)[0]).exp()
        out = F.normalize(weights, p=1, dim=-1) @ v  # (B, heads, N, head_dim)
        return self.proj(out.transpose(1, 2).reshape(batch, tokens, width))


class AuthorsPerViT(PerViT):
    """Its ``log_phi`` gives Φp itself."""

    def log_phi(self, grid: tuple[int, int]) -> list[Tensor | None]:
        rows, columns = (side + 4 for side in grid)
        like = self.drop_path_rates
        # (N, 1, H + 4, W + 4) -> the grid with its border instead of the queries, as the published code builds it
        distance = position_distances(*grid, like.device, like.dtype)[:, 0]
        padded = distance.new_zeros(rows, columns, rows, columns)
        padded[2:-2, 2:-2] = distance.unflatten(0, grid)
        r = F.linear(padded[..., None], self.distance_scales.weight, self.distance_scales.bias)  # (.., 4 * heads)
        maps: list[Tensor | None] = []
        for block in self.blocks:
            own = r.permute(4, 0, 1, 2, 3)[:, 2:-2, 2:-2]  # (4 * heads, H, W, H + 4, W + 4)
            maps.append(block.position(own.permute(1, 2, 0, 3, 4).flatten(0, 1)))
        return maps


_FORMS = {
    PerViT: AuthorsPerViT,
    ConvStem: AuthorsStem,
    PeripheralPosition: AuthorsPosition,
    PeripheralAttention: AuthorsAttention,
}


def authors_form(model: PerViT) -> PerViT:
    """Change a model of the published design, in place, into the authors' form."""
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
        module.__class__ = _FORMS.get(type(module), module.__class__)  # type: ignore[assignment]
    return model


def authors_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of (B, classes) with dense targets of the same shape."""
    return torch.sum(-targets * F.log_softmax(scores, dim=-1), dim=-1).mean()
